"""Between Hugging Face and Megatron-core: one table per model family, and model folders of both kinds.

`architecture` has a model's sizes, `families` the table of its parameters, `mapping` the rules that such a table is
made of; `model_folder`, `config_text`, `hf_folder` and `hf_write` read and write folders, `record` and
`compare_tensors` say what became of the weights, `lora` has the adapters beside them.
"""

"""The models that SGLang finds here (SGLANG_EXTERNAL_MODEL_PACKAGE); naming them saves it importing all of its own."""

"""Games, responses and the published verifiers for `compare_with_synlogic.py`: SynLogic's repository as a peer."""

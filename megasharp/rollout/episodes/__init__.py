"""Responses of several turns: environments answer what an engine samples, and the engine goes on."""

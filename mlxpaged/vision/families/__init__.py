"""A folder for each family of models that see: tower, format of prompts, how it is loaded."""

"""The engine thread and what runs on it: commands, steps, model runner, sampler, detokenizer, delivery of outputs."""

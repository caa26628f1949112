"""GPT pretraining: a plain model, parallelism put on from outside, and a loop that says where its time went."""

"""`zeroshard doctor`: check whether a job is ready for training, and recommend options."""

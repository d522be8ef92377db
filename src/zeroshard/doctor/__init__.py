"""`zeroshard doctor`: is this job fit for training, and with which options?"""

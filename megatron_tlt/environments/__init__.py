"""Environments answer a policy's turns, so that a response consists of several; they run in processes of their own."""

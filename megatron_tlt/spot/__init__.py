"""The spot trainer: the drafter learns on released ranks, told by a coordinator; its checkpoints are written beside."""

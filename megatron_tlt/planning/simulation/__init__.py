"""Event-by-event simulation of RL steps on a whole cluster; pure, with plain data in and out.

It uses no device. Gate, choice of strategy and sessions of the spot trainer are implemented again here, for many
engines at a time; tests compare them with the product's own.
"""

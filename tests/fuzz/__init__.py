"""Inputs drawn at random, damaged and hostile ones among them, for everything that takes what
others have written."""

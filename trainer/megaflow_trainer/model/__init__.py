"""The model as plain maths: no ranks, no collectives. Four sockets are left for what is put on from outside."""

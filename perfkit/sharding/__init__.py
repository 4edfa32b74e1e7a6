"""What a placement of embedding tables costs, needs and at best could cost; the search for a good
one."""

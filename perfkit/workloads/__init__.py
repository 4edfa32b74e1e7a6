"""What has to be computed: operations, embedding tables, placements and the builders of whole
training iterations."""

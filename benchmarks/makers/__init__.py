"""What makes committed files: platforms of the gallery (`gallery`, `gallery_v100`) and pictures of docs/ (`pictures`).

They answer no question; the benchmarks judge what they make.
"""

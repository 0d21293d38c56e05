"""What a release carries beside the wheel: source and binary archive, Debian packages, SBOM, notes, checksums.

Everything is a function of the commit: times are the commit's, owners are root, orders are sorted, modes are fixed. Two
releases of one commit, made in two folders, have the same bytes; `tools/release/twice.py` makes both and compares.
"""

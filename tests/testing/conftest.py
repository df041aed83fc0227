import os

# Kernels are interpreted or compiled as this says when they are defined: set it before any test module is imported.
os.environ["TRITON_INTERPRET"] = "1"

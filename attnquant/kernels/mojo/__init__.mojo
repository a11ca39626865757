"""The graph operations of attnquant: `attnquant_nvfp4_matmul` and the host codec."""

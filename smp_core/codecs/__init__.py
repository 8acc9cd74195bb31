"""Payloads that are smaller than their tensors: bfloat16, blockwise int8 and int4, fp8."""

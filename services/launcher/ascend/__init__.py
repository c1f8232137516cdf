"""What a machine with Ascend NPUs has and lacks, from device files to the versions of torch and torch_npu."""

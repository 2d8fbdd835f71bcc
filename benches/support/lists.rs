//! Tensor lists of real networks: the lengths of their parameters, in order.

/// The convolutional network M7 of the paper's case study (An et al. 2020): 15 tensors, 2,291,972 parameters.
pub fn m7() -> Vec<usize> {
    let mut list = Vec::new();
    for (from, to) in [(1, 48), (48, 96), (96, 144), (144, 192)] {
        list.extend([from * to * 49, to, to]);
    }
    list.extend([192 * 16 * 10, 10, 10]);
    list
}

/// ResNet-50: 161 tensors, 25,557,032 parameters.
pub fn resnet50() -> Vec<usize> {
    let conv = |list: &mut Vec<usize>, from: usize, to: usize, kernel: usize| {
        list.extend([from * to * kernel * kernel, to, to]);
    };
    let mut list = Vec::new();
    conv(&mut list, 3, 64, 7);
    let mut from = 64;
    for (width, blocks) in [(64, 3), (128, 4), (256, 6), (512, 3)] {
        for block in 0..blocks {
            conv(&mut list, from, width, 1);
            conv(&mut list, width, width, 3);
            conv(&mut list, width, 4 * width, 1);
            if block == 0 {
                conv(&mut list, from, 4 * width, 1);
            }
            from = 4 * width;
        }
    }
    list.extend([2048 * 1000, 1000]);
    list
}

/// GPT-2 with 124M parameters: 148 tensors.
pub fn gpt2() -> Vec<usize> {
    let d = 768;
    let mut list = vec![50_257 * d, 1024 * d];
    for _ in 0..12 {
        list.extend([d, d, d * 3 * d, 3 * d, d * d, d, d, d, d * 4 * d, 4 * d, 4 * d * d, d]);
    }
    list.extend([d, d]);
    list
}

/// A Llama of 1.1 billion parameters (22 blocks, 4 key-value heads of 64): 201 tensors.
#[allow(dead_code)] // too large for the CPU's benchmark
pub fn llama() -> Vec<usize> {
    let (d, hidden, key_value) = (2048, 5632, 256);
    let mut list = vec![32_000 * d];
    for _ in 0..22 {
        list.extend([d * d, d * key_value, d * key_value, d * d, d * hidden, d * hidden, hidden * d, d, d]);
    }
    list.extend([d, 32_000 * d]);
    list
}

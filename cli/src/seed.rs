//! One seed, many independent streams: what is drawn for one purpose never shifts what is drawn for another.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// What random numbers are drawn for.
#[derive(Clone, Copy, Debug)]
pub enum Purpose {
    /// A network's parameters.
    Initialisation = 1,
    /// The order of the training examples.
    BatchOrder = 2,
    // 3 is the stream of the samples of auto-fit (`rfdescent_candle::NetworkSampler`).
    /// What the classes of the generated data look like.
    Prototypes = 4,
}

/// The generator of a seed for one purpose.
pub fn generator(seed: u64, purpose: Purpose) -> ChaCha8Rng {
    stream(seed, purpose as u64)
}

/// The generator of one generated image; its streams lie apart from those of [`Purpose`].
pub fn image_generator(seed: u64, index: u64) -> ChaCha8Rng {
    stream(seed, (1 << 32) + index)
}

fn stream(seed: u64, stream: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    rng
}

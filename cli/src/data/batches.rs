//! Seeded draws of training examples.

use rand::RngExt;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use crate::seed::{Purpose, generator};

/// The mini-batches of a training run: a fresh permutation each epoch, the last incomplete batch left out.
#[derive(Debug)]
pub struct Batches {
    order: Vec<u32>,
    batch_size: usize,
    rng: ChaCha8Rng,
}

impl Batches {
    /// Batches of `batch_size` out of `examples`, the same for the same seed.
    pub fn new(examples: usize, batch_size: usize, seed: u64) -> Self {
        let order = (0..examples as u32).collect();
        Batches { order, batch_size, rng: generator(seed, Purpose::BatchOrder) }
    }

    /// How many complete batches an epoch has.
    pub fn per_epoch(&self) -> usize {
        self.order.len() / self.batch_size
    }

    /// Shuffles, and returns the next epoch's batches.
    pub fn epoch(&mut self) -> std::slice::ChunksExact<'_, u32> {
        self.order.shuffle(&mut self.rng);
        self.order.chunks_exact(self.batch_size)
    }
}

/// `count` different indices below `examples`, each subset equally likely (Floyd's algorithm: no array of all
/// indices is made, as this is called for thousands of small batches).
pub fn draw_batch(examples: usize, count: usize, rng: &mut ChaCha8Rng) -> Vec<u32> {
    let mut chosen = std::collections::HashSet::with_capacity(count);
    let mut batch = Vec::with_capacity(count);
    for last in examples - count..examples {
        let candidate = rng.random_range(0..=last as u32);
        let index = if chosen.insert(candidate) { candidate } else { last as u32 };
        chosen.insert(index);
        batch.push(index);
    }
    batch
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_visits_no_example_twice_and_drops_only_the_incomplete_batch() {
        let mut batches = Batches::new(10, 3, 1);
        assert_eq!(batches.per_epoch(), 3);
        let first: Vec<u32> = batches.epoch().flatten().copied().collect();
        let mut sorted = first.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), 9);
        let second: Vec<u32> = batches.epoch().flatten().copied().collect();
        assert_ne!(first, second);
        assert_eq!(first, Batches::new(10, 3, 1).epoch().flatten().copied().collect::<Vec<_>>());
    }

    #[test]
    fn drawn_batches_have_no_repeats_and_reach_every_example_equally() {
        let mut rng = generator(3, Purpose::BatchOrder);
        let mut hits = [0u32; 12];
        for _ in 0..6000 {
            let batch = draw_batch(12, 5, &mut rng);
            let distinct: std::collections::HashSet<_> = batch.iter().collect();
            assert_eq!((batch.len(), distinct.len()), (5, 5));
            batch.iter().for_each(|&i| hits[i as usize] += 1);
        }
        // Binomial(6000, 5/12): mean 2500, deviation 38; six deviations.
        assert!(hits.iter().all(|&h| h.abs_diff(2500) < 230), "{hits:?}");
        assert_eq!(draw_batch(4, 4, &mut rng).len(), 4);
    }
}

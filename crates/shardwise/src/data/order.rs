//! In which order samples are drawn. Pure arithmetic: an order is computed for any place in it, and nothing is stored.

use crate::error::{ErrorKind, Result};

/// Rounds of the network that shuffles. Four suffice for a permutation that looks random; more cost little.
const ROUNDS: u64 = 6;

/// The order of the samples of a dataset, epoch after epoch.
///
/// Every epoch has every sample once. Which sample has a number does not depend on batch sizes or on how many ranks draw.
///
/// ```
/// use shardwise::data::SampleOrder;
///
/// let order = SampleOrder::new(10)?.shuffled(7);
/// let mut epoch: Vec<u64> = (10..20).map(|number| order.sample(number)).collect();
/// assert_ne!(epoch, (0..10).map(|number| order.sample(number)).collect::<Vec<_>>());
/// epoch.sort();
/// assert_eq!(epoch, (0..10).collect::<Vec<_>>());
/// # Ok::<(), shardwise::Error>(())
/// ```
#[doc(alias = "DistributedSampler")]
#[doc(alias = "RandomSampler")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleOrder {
    samples: u64,
    seed: Option<u64>,
}

impl SampleOrder {
    /// The order of the dataset itself, over and over.
    ///
    /// # Errors
    /// If there are no samples.
    pub fn new(samples: usize) -> Result<Self> {
        if samples == 0 {
            let fix = "give the dataset more data, or use shorter sequences";
            return Err(ErrorKind::Data.error("dataset", "no samples", "at least one", fix));
        }
        Ok(SampleOrder { samples: samples as u64, seed: None })
    }

    /// Another order in every epoch, the same for the same seed.
    pub fn shuffled(self, seed: u64) -> Self {
        SampleOrder { seed: Some(seed), ..self }
    }

    /// Number of samples of an epoch.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// What the order is shuffled with, if it is.
    pub fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// The sample with a number, counted from the first one of the first epoch.
    pub fn sample(&self, number: u64) -> u64 {
        let (epoch, place) = (number / self.samples, number % self.samples);
        let Some(seed) = self.seed else { return place };
        let key = mix(seed ^ mix(epoch));
        // A permutation of the next power of four: numbers beyond the samples are passed on until one is a sample.
        let mut place = place;
        loop {
            place = self.permuted(place, key);
            if place < self.samples {
                return place;
            }
        }
    }

    /// A place in another order: a Feistel network on the two halves of its bits.
    fn permuted(&self, place: u64, key: u64) -> u64 {
        let bits = (u64::BITS - (self.samples - 1).leading_zeros()).div_ceil(2).max(1);
        let mask = (1 << bits) - 1;
        let (mut left, mut right) = (place >> bits, place & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ mix(key ^ mix(right ^ (round << 32))) & mask);
        }
        left << bits | right
    }
}

/// A number that has nothing to do with the one it is computed from (SplitMix64).
fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_has_every_sample_once() {
        for samples in (1..70).chain([255, 256, 257, 1000, 4097]) {
            for order in [SampleOrder::new(samples).unwrap(), SampleOrder::new(samples).unwrap().shuffled(3)] {
                for epoch in 0..3 {
                    let first = epoch * samples as u64;
                    let mut drawn: Vec<u64> = (first..first + samples as u64).map(|n| order.sample(n)).collect();
                    drawn.sort_unstable();
                    assert_eq!(drawn, (0..samples as u64).collect::<Vec<_>>(), "{order:?}");
                }
            }
        }
    }

    #[test]
    fn places_of_a_shuffled_order_are_evenly_distributed() {
        // Over 4000 seeds each of 8 samples is first about 500 times; the standard deviation is 21.
        let mut counts = [0i32; 8];
        for seed in 0..4000 {
            counts[SampleOrder::new(8).unwrap().shuffled(seed).sample(0) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (count - 500).abs() < 6 * 21), "{counts:?}");
    }
}

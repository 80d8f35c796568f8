//! The order of samples, computed for any position: no permutation is stored, so that resuming costs nothing.

use crate::error::{ErrorKind, Result};

/// Rounds of the Feistel network that shuffles. Four make a pseudorandom permutation (Luby and Rackoff); two more cost
/// little.
const ROUNDS: u64 = 6;

/// The order in which the samples of a dataset are drawn, epoch after epoch; every epoch has every sample once.
///
/// It maps positions to samples. The map depends neither on batch sizes nor on the number of ranks.
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
    /// The order of the dataset itself, in every epoch.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if there are no samples.
    pub fn new(samples: usize) -> Result<Self> {
        if samples == 0 {
            let fix = "give the dataset more data, or use shorter sequences";
            return Err(ErrorKind::Data.error("dataset", "no samples", "at least one", fix));
        }
        Ok(SampleOrder { samples: samples as u64, seed: None })
    }

    /// Shuffles every epoch anew; the order depends only on the seed.
    pub fn shuffled(self, seed: u64) -> Self {
        SampleOrder { seed: Some(seed), ..self }
    }

    /// Number of samples of an epoch.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Seed of the shuffle, if the order is shuffled.
    pub fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// Returns the index of the sample at a position, counted from the beginning of the first epoch.
    pub fn sample(&self, position: u64) -> u64 {
        let (epoch, index) = (position / self.samples, position % self.samples);
        let Some(seed) = self.seed else { return index };
        let key = mix(seed ^ mix(epoch));
        // The network permutes the next power of four. Cycle walking restricts that to the samples: an index beyond them is
        // permuted again until it is one of them.
        let mut index = index;
        loop {
            index = self.permuted(index, key);
            if index < self.samples {
                return index;
            }
        }
    }

    /// A Feistel network on the two halves of the bits of an index.
    fn permuted(&self, index: u64, key: u64) -> u64 {
        let bits = (u64::BITS - (self.samples - 1).leading_zeros()).div_ceil(2).max(1);
        let mask = (1 << bits) - 1;
        let (mut left, mut right) = (index >> bits, index & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ mix(key ^ mix(right ^ (round << 32))) & mask);
        }
        left << bits | right
    }
}

/// SplitMix64: a hash of a number.
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

//! The order of samples, computed for any position: no permutation is stored, so that resuming costs nothing.

use std::sync::Arc;

use crate::error::{ErrorKind, Result};

/// Rounds of the Feistel network that shuffles. Four make a pseudorandom permutation (Luby and Rackoff); two more cost
/// little.
const ROUNDS: u64 = 6;

/// Positions after which the sources of a mixture repeat: enough for weights that differ by a factor of a thousand.
const PERIOD: u64 = 4096;

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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleOrder {
    sources: Arc<[OrderedSource]>,
    /// The source of each position of a period, and how many samples of it come before in the period. Empty for one source.
    pattern: Arc<[(u16, u16)]>,
    samples: u64,
    seed: Option<u64>,
}

/// A range of samples that has epochs of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
struct OrderedSource {
    /// Its first sample.
    first: u64,
    samples: u64,
    /// Its positions among [`PERIOD`].
    share: u64,
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
        let samples = samples as u64;
        let sources = [OrderedSource { first: 0, samples, share: PERIOD }].into();
        Ok(SampleOrder { sources, pattern: [].into(), samples, seed: None })
    }

    /// An order that draws from several sources by weight, given as (samples, weight). The samples of the first source come first
    /// in the dataset, then those of the second one.
    ///
    /// Of every 4096 positions a source gets its share, rounded to an integer, and these positions are spread evenly. Each source has
    /// epochs of its own: none of its samples comes again before each has come once.
    ///
    /// ```
    /// use shardwise::data::SampleOrder;
    ///
    /// let order = SampleOrder::weighted(&[(10, 3.0), (1_000_000, 1.0)])?;
    /// let of_first = (0..4096).filter(|&position| order.sample(position) < 10).count();
    /// assert_eq!((of_first, order.drawn(4096)), (3072, vec![3072, 1024]));
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Data`] if a source has no samples, or a weight is not positive or less than half of a 4096th of all.
    #[doc(alias = "interleave_datasets")]
    #[doc(alias = "WeightedRandomSampler")]
    pub fn weighted(sources: &[(usize, f64)]) -> Result<Self> {
        let total: f64 = sources.iter().map(|(_, weight)| weight).sum();
        let wanted = |i: usize| sources[i].1 / total * PERIOD as f64;
        for (i, &(samples, weight)) in sources.iter().enumerate() {
            if samples == 0 || !(weight > 0.0 && total.is_finite() && wanted(i) >= 0.5) {
                let found = format!("{samples} sample(s) with weight {weight} in source {i}");
                let needed = format!("samples, and a weight of at least a {}th of all weights", 2 * PERIOD);
                return Err(ErrorKind::Data.error(
                    "mixture",
                    found,
                    needed,
                    "leave the source out or raise its weight",
                ));
            }
        }
        if sources.is_empty() {
            return Err(ErrorKind::Data.error("mixture", "no sources", "at least one", "pass a dataset"));
        }
        // Rounded so that the sum is exact and no source is left without a position.
        let mut shares: Vec<u64> = (0..sources.len()).map(|i| (wanted(i) as u64).max(1)).collect();
        let furthest = |shares: &[u64], ahead: bool| {
            let behind = |&i: &usize| (wanted(i) - shares[i] as f64) * if ahead { -1.0 } else { 1.0 };
            let candidates = (0..shares.len()).filter(|&i| !ahead || shares[i] > 1);
            candidates.max_by(|a, b| behind(a).total_cmp(&behind(b))).expect("fewer sources than positions")
        };
        while shares.iter().sum::<u64>() < PERIOD {
            let i = furthest(&shares, false);
            shares[i] += 1;
        }
        while shares.iter().sum::<u64>() > PERIOD {
            let i = furthest(&shares, true);
            shares[i] -= 1;
        }
        let mut first = 0;
        let ordered = sources.iter().zip(&shares).map(|(&(samples, _), &share)| {
            let source = OrderedSource { first, samples: samples as u64, share };
            first += samples as u64;
            source
        });
        let sources: Arc<[OrderedSource]> = ordered.collect();
        let pattern = if sources.len() == 1 { [].into() } else { pattern(&shares) };
        Ok(SampleOrder { sources, pattern, samples: first, seed: None })
    }

    /// Shuffles every epoch anew; the order depends only on the seed.
    pub fn shuffled(self, seed: u64) -> Self {
        SampleOrder { seed: Some(seed), ..self }
    }

    /// Number of samples of all sources.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Seed of the shuffle, if the order is shuffled.
    pub fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// The sources as (samples, positions of 4096). Two orders are the same if these and the seeds are.
    pub fn shares(&self) -> Vec<(u64, u64)> {
        self.sources.iter().map(|source| (source.samples, source.share)).collect()
    }

    /// The sources as a text that checkpoints store; none for a single one.
    pub fn shares_text(&self) -> Option<String> {
        (self.sources.len() > 1).then(|| format!("{:?}", self.shares()))
    }

    /// How many samples of each source are drawn before a position.
    pub fn drawn(&self, position: u64) -> Vec<u64> {
        if self.pattern.is_empty() {
            return vec![position];
        }
        let (period, rest) = (position / PERIOD, (position % PERIOD) as usize);
        let begun = |at: usize| self.pattern[..rest].iter().filter(|(source, _)| usize::from(*source) == at).count();
        self.sources.iter().enumerate().map(|(at, source)| period * source.share + begun(at) as u64).collect()
    }

    /// Returns the index of the sample at a position, counted from the beginning of the first epoch.
    pub fn sample(&self, position: u64) -> u64 {
        let Some(&(at, before)) = self.pattern.get((position % PERIOD) as usize) else {
            return self.sample_of(0, position);
        };
        let at = usize::from(at);
        self.sample_of(at, position / PERIOD * self.sources[at].share + u64::from(before))
    }

    /// The sample that a source draws as its `number`th one.
    fn sample_of(&self, at: usize, number: u64) -> u64 {
        let source = &self.sources[at];
        let (epoch, index) = (number / source.samples, number % source.samples);
        let Some(seed) = self.seed else { return source.first + index };
        // Sources of equal sizes have orders of their own. No run has 2^48 epochs.
        let key = mix(seed ^ mix(epoch ^ ((at as u64) << 48)));
        source.first + permuted_below(source.samples, index, key)
    }
}

/// Spreads the shares of sources over a period: each position goes to the source that is furthest behind its share.
fn pattern(shares: &[u64]) -> Arc<[(u16, u16)]> {
    let mut drawn = vec![0u64; shares.len()];
    let next = |position: u64| {
        // In units of positions times the period.
        let behind = |i: &usize| (shares[*i] * (position + 1)).cast_signed() - (drawn[*i] * PERIOD).cast_signed();
        let open = (0..shares.len()).rev().filter(|&i| drawn[i] < shares[i]);
        let at = open.max_by_key(behind).expect("as many positions as shares");
        drawn[at] += 1;
        (at as u16, (drawn[at] - 1) as u16)
    };
    (0..PERIOD).map(next).collect()
}

/// A permutation of the numbers below `count`.
///
/// The network permutes the next power of four. Cycle walking restricts that: a number that is not below the count is permuted
/// again until it is.
fn permuted_below(count: u64, number: u64, key: u64) -> u64 {
    let bits = (u64::BITS - (count - 1).leading_zeros()).div_ceil(2).max(1);
    let mut number = number;
    loop {
        number = permuted(bits, number, key);
        if number < count {
            return number;
        }
    }
}

/// A Feistel network on the two halves of a number, of `bits` bits each.
fn permuted(bits: u32, number: u64, key: u64) -> u64 {
    let mask = (1 << bits) - 1;
    let (mut left, mut right) = (number >> bits, number & mask);
    for round in 0..ROUNDS {
        (left, right) = (right, left ^ mix(key ^ mix(right ^ (round << 32))) & mask);
    }
    left << bits | right
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
    fn sources_get_their_shares_and_keep_their_epochs() {
        for sources in [&[(5, 1.0), (5, 1.0)][..], &[(7, 0.7), (1, 0.1), (900, 0.2)], &[(3, 4096.0), (4, 0.6)]] {
            for order in [SampleOrder::weighted(sources).unwrap(), SampleOrder::weighted(sources).unwrap().shuffled(5)]
            {
                let total: f64 = sources.iter().map(|(_, weight)| weight).sum();
                let mut numbers: Vec<Vec<u64>> = vec![Vec::new(); sources.len()];
                for position in 0..2 * PERIOD + 100 {
                    let found: Vec<u64> = numbers.iter().map(|numbers| numbers.len() as u64).collect();
                    assert_eq!(order.drawn(position), found, "{order:?}");
                    for (count, (_, weight)) in found.iter().zip(sources) {
                        let far = *count as f64 - position as f64 * weight / total;
                        // One for the position, half of one per period for the rounded share.
                        assert!(far.abs() <= 2.5, "{far} at {position} of {sources:?}");
                    }
                    let sample = order.sample(position);
                    let at = order.sources.iter().rposition(|source| source.first <= sample).unwrap();
                    numbers[at].push(sample);
                }
                for (source, numbers) in order.sources.iter().zip(&numbers) {
                    let all: Vec<u64> = (source.first..source.first + source.samples).collect();
                    for epoch in numbers.chunks_exact(source.samples as usize) {
                        let mut epoch = epoch.to_vec();
                        epoch.sort_unstable();
                        assert_eq!(epoch, all, "{sources:?}");
                    }
                }
            }
        }
        // Sources of equal sizes are not shuffled alike.
        let order = SampleOrder::weighted(&[(50, 1.0), (50, 1.0)]).unwrap().shuffled(1);
        assert!((0..100).step_by(2).any(|position| order.sample(position) + 50 != order.sample(position + 1)));
        assert!(SampleOrder::weighted(&[]).is_err());
        for bad in [(0, 1.0), (1, 0.0), (1, f64::NAN), (1, -1.0), (1, 1e-5), (1, f64::INFINITY)] {
            assert!(SampleOrder::weighted(&[(1, 1.0), bad]).is_err(), "{bad:?}");
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

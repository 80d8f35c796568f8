//! Checks over all ranks of a group: the same values everywhere, and one rank's error as everyone's.

use std::panic::Location;

use candle_core::{Device, Tensor};

use super::{Call, Group};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::fnv::fnv1a;

/// An error on every rank unless all ranks of the group pass the same texts, given as `(name, text)`. The error names the
/// first text that differs, and two ranks. Communicates one hash per text; the texts themselves only if they differ.
pub(crate) fn agree(group: &Group, named: &[(&'static str, &str)], site: Site) -> Result<()> {
    if group.is_dry() || group.size() == 1 {
        return Ok(());
    }
    let mine: Vec<i64> = named.iter().map(|(_, text)| text_hash(text)).collect();
    let mine = Tensor::from_vec(mine, (1, named.len()), &Device::Cpu)?;
    let sizes = std::iter::repeat_n(1, group.size()).collect();
    let all: Vec<Vec<i64>> = group.run(&Call::AllGather { dim: 0, sizes }, &[mine], site)?.swap_remove(0).to_vec2()?;
    for (i, (what, text)) in named.iter().enumerate() {
        let Some(other) = all.iter().position(|hashes| hashes[i] != all[0][i]) else { continue };
        let texts = gather_texts(group, text, site)?;
        let found =
            format!("{} on rank {}, {} on rank {}", texts[0], group.ranks()[0], texts[other], group.ranks()[other]);
        return Err(ErrorKind::Disagreement.error(
            what,
            found,
            "the same on all ranks",
            "pass the same value on all ranks",
        ));
    }
    Ok(())
}

/// Gathers one text per rank, in group order. Collective: one small all-gather of lengths, and one of bytes unless all
/// texts are empty.
pub(crate) fn gather_texts(group: &Group, mine: &str, site: Site) -> Result<Vec<String>> {
    if group.is_dry() {
        let found = "a dry run, in which the values of other ranks are unknown";
        return Err(ErrorKind::NoData.error(
            "call",
            found,
            "a run with all ranks",
            "pass the values explicitly instead of gathering them",
        ));
    }
    let length = Tensor::new(&[mine.len() as i64], &Device::Cpu)?;
    let ones = std::iter::repeat_n(1, group.size()).collect();
    let lengths: Vec<i64> =
        group.run(&Call::AllGather { dim: 0, sizes: ones }, &[length], site)?.swap_remove(0).to_vec1()?;
    // The usual case of `all_ok`: no rank has an error.
    if lengths.iter().all(|&length| length == 0) {
        return Ok(vec![String::new(); group.size()]);
    }
    let bytes = Tensor::from_vec(mine.as_bytes().to_vec(), mine.len(), &Device::Cpu)?;
    let sizes = lengths.iter().map(|&n| n as usize).collect();
    let all: Vec<u8> = group.run(&Call::AllGather { dim: 0, sizes }, &[bytes], site)?.swap_remove(0).to_vec1()?;
    let mut rest = all.as_slice();
    let mut next = |length: &i64| {
        let (text, later) = rest.split_at(*length as usize);
        rest = later;
        String::from_utf8_lossy(text).into_owned()
    };
    Ok(lengths.iter().map(&mut next).collect())
}

/// Returns `mine` if it is `Ok` on every rank of the group; else the error of the first rank that has one, on all ranks.
pub(crate) fn all_ok<T>(group: &Group, mine: Result<T>, site: Site) -> Result<T> {
    let report = mine.as_ref().err().map(Error::to_report).unwrap_or_default();
    let all = gather_texts(group, &report, site)?;
    match all.iter().position(|text| !text.is_empty()) {
        None => mine,
        Some(position) => Err(Error::from_report(group.ranks()[position], &all[position])),
    }
}

impl Group {
    /// Makes one rank's error the error of all ranks, after local work that may fail on some of them.
    ///
    /// Collective. Returns `mine` if it is `Ok` on every rank; else [`Error::OnRank`] with the error of the first rank that
    /// failed, on all ranks. Costs one small all-gather.
    ///
    /// ```
    /// # use shardwise::{launch, Error};
    /// let parsed = launch(2, |world| {
    ///     let text = ["12", "a dozen"][world.rank()]; // such as a file that differs between machines
    ///     world.all_ok(text.parse::<u32>().map_err(Error::other))
    /// });
    /// assert_eq!(parsed.unwrap_err().to_string(), "on rank 1: invalid digit found in string");
    /// ```
    #[track_caller]
    pub fn all_ok<T>(&self, mine: Result<T>) -> Result<T> {
        // A dry run has no other ranks to ask.
        if self.is_dry() { mine } else { all_ok(self, mine, Location::caller()) }
    }

    /// Runs `body` on the first rank of the group only, such as to write a file or to log.
    ///
    /// Collective: the other ranks wait. The first rank gets `Some` result, other ranks `None`; an error of `body` is
    /// [`Error::OnRank`] on all ranks.
    ///
    /// ```
    /// # use shardwise::launch;
    /// launch(3, |world| {
    ///     let written = world.on_first_rank(|| Ok(std::fs::write("/no/such/directory/log", "begun")?));
    ///     assert!(written.unwrap_err().to_string().starts_with("on rank 0: I/O error"));
    ///     assert_eq!(world.on_first_rank(|| Ok(7))?, (world.rank() == 0).then_some(7));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    #[track_caller]
    pub fn on_first_rank<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        self.all_ok(if self.rank() == 0 { body().map(Some) } else { Ok(None) })
    }
}

/// A hash that is the same in every process.
fn text_hash(text: &str) -> i64 {
    fnv1a(text.as_bytes()) as i64
}

//! Whether all ranks say the same, and if not, who says what.

use std::panic::Location;

use candle_core::{Device, Tensor};

use super::{Call, Group};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::fnv::fnv1a;

/// An error on every rank unless all ranks of the group say the same of every thing; it names the first two that differ.
pub(crate) fn agree(group: &Group, things: &[(&'static str, &str)], site: Site) -> Result<()> {
    if group.is_dry() || group.size() == 1 {
        return Ok(());
    }
    let mine: Vec<i64> = things.iter().map(|(_, said)| fingerprint(said)).collect();
    let mine = Tensor::from_vec(mine, (1, things.len()), &Device::Cpu)?;
    let sizes = std::iter::repeat_n(1, group.size()).collect();
    let all: Vec<Vec<i64>> = group.run(&Call::AllGather { dim: 0, sizes }, &[mine], site)?.swap_remove(0).to_vec2()?;
    for (i, (what, said)) in things.iter().enumerate() {
        let Some(other) = all.iter().position(|numbers| numbers[i] != all[0][i]) else { continue };
        let texts = texts(group, said, site)?;
        let found =
            format!("{} on rank {}, {} on rank {}", texts[0], group.ranks()[0], texts[other], group.ranks()[other]);
        return Err(ErrorKind::Disagreement.error(what, found, "the same on all ranks", "let all ranks pass the same"));
    }
    Ok(())
}

/// What every rank of the group says, in group order.
pub(crate) fn texts(group: &Group, mine: &str, site: Site) -> Result<Vec<String>> {
    if group.is_dry() {
        let found = "a dry run, in which nobody knows what other ranks have";
        return Err(ErrorKind::NoData.error(
            "call",
            found,
            "a run with all ranks",
            "say it without asking other ranks",
        ));
    }
    let length = Tensor::new(&[mine.len() as i64], &Device::Cpu)?;
    let ones = std::iter::repeat_n(1, group.size()).collect();
    let lengths: Vec<i64> =
        group.run(&Call::AllGather { dim: 0, sizes: ones }, &[length], site)?.swap_remove(0).to_vec1()?;
    // Of errors there are none, as a rule.
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

/// What this rank has, if no rank of the group has an error; else the first error, on all ranks alike.
pub(crate) fn together<T>(group: &Group, mine: Result<T>, site: Site) -> Result<T> {
    let said = mine.as_ref().err().map(Error::to_report).unwrap_or_default();
    let all = texts(group, &said, site)?;
    match all.iter().position(|text| !text.is_empty()) {
        None => mine,
        Some(position) => Err(Error::from_report(group.ranks()[position], &all[position])),
    }
}

impl Group {
    /// What this rank has, if every rank of the group has something; else the error of the first rank that has one, as
    /// [`Error::OnRank`] on all ranks. For what each rank does by itself before they go on together.
    ///
    /// ```
    /// # use shardwise::{launch, Error};
    /// let parsed = launch(2, |world| {
    ///     let text = ["12", "a dozen"][world.rank()]; // such as a file that differs between machines
    ///     world.together(text.parse::<u32>().map_err(Error::other))
    /// });
    /// assert_eq!(parsed.unwrap_err().to_string(), "on rank 1: invalid digit found in string");
    /// ```
    #[track_caller]
    pub fn together<T>(&self, mine: Result<T>) -> Result<T> {
        // A dry run knows of no other ranks.
        if self.is_dry() { mine } else { together(self, mine, Location::caller()) }
    }

    /// Runs `body` on the first rank of the group, which gets its result, while the others wait; all ranks get its error.
    /// For what one rank does for all, such as writing a file.
    ///
    /// ```
    /// # use shardwise::launch;
    /// launch(3, |world| {
    ///     let written = world.first(|| Ok(std::fs::write("/no/such/directory/log", "begun")?));
    ///     assert!(written.unwrap_err().to_string().starts_with("on rank 0: input or output failed"));
    ///     assert_eq!(world.first(|| Ok(7))?, (world.rank() == 0).then_some(7));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    #[track_caller]
    pub fn first<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        self.together(if self.rank() == 0 { body().map(Some) } else { Ok(None) })
    }
}

/// The same number for the same text on every rank.
fn fingerprint(text: &str) -> i64 {
    fnv1a(text.as_bytes()) as i64
}

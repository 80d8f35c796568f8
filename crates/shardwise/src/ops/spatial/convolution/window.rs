//! The sliding window of a convolution or pooling along one dimension.

use std::ops::Range;

use crate::error::{ErrorKind, Result};

/// The sliding window of a convolution or pooling along one dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Window {
    pub(super) size: usize,
    pub(super) stride: usize,
    pub(super) padding: usize,
    pub(super) dilation: usize,
}

/// The number of windows along every spatial dimension of an input of shape `[n, channels, ...]`, or with groups.
///
/// # Errors
/// If a window does not fit, or has no size, stride or dilation.
pub(super) fn window_counts(name: &str, windows: &[Window], shape: &[usize]) -> Result<Vec<usize>> {
    let bad = |window: &Window| window.size == 0 || window.stride == 0 || window.dilation == 0;
    let sizes = &shape[shape.len() - windows.len()..];
    let counts: Option<Vec<usize>> = match windows.iter().any(bad) {
        true => None,
        false => windows.iter().zip(sizes).map(|(w, &n)| w.count(n)).collect(),
    };
    counts.ok_or_else(|| {
        let found = format!("shape {shape:?} and windows {windows:?} in {name}");
        ErrorKind::shape(shape).error(
            "operands",
            found,
            "room for at least one window, in a padded dimension that memory can address",
            "correct padding, dilation or the size of the window",
        )
    })
}

impl Window {
    /// The extent of a window with its dilation. Cannot overflow for a window that fits, see [`count`](Self::count).
    fn reach(&self) -> usize {
        (self.size - 1) * self.dilation + 1
    }

    /// The number of windows in a dimension; `None` if none fits or the padded dimension is not addressable.
    pub(super) fn count(&self, n: usize) -> Option<usize> {
        let reach = (self.size - 1).checked_mul(self.dilation)?.checked_add(1)?;
        let padded = self.padding.checked_mul(2)?.checked_add(n).filter(|&n| n <= isize::MAX as usize)?;
        Some(padded.checked_sub(reach)? / self.stride + 1)
    }

    /// The smallest size, without padding, of a dimension that has `count` windows; `None` if there is none.
    pub(super) fn covered(&self, count: usize) -> Option<usize> {
        if self.size == 0 || self.stride == 0 || self.dilation == 0 {
            return None;
        }
        let reach = (self.size - 1).checked_mul(self.dilation)?.checked_add(1)?;
        let padded = count.checked_sub(1)?.checked_mul(self.stride)?.checked_add(reach)?;
        padded.checked_sub(self.padding.checked_mul(2)?).filter(|&n| n <= isize::MAX as usize)
    }

    /// How many of `count` windows have their middle in a range of indices. Middles ascend, so two binary searches suffice.
    pub(super) fn middles_in(&self, range: &Range<usize>, count: usize, n: usize) -> usize {
        let before = |index: usize| {
            let (mut low, mut high) = (0, count);
            while low < high {
                let window = low + (high - low) / 2;
                if self.middle(window, n) < index { low = window + 1 } else { high = window }
            }
            low
        };
        if n == 0 { 0 } else { before(range.end) - before(range.start) }
    }

    /// The index in the middle of a window: the rank that holds it computes the window.
    fn middle(&self, window: usize, n: usize) -> usize {
        (window * self.stride + self.reach() / 2).saturating_sub(self.padding).min(n - 1)
    }

    /// The windows, of `count`, that contain any of the indices `from..to`.
    pub(super) fn touching(&self, from: usize, to: usize, count: usize) -> Range<usize> {
        if from >= to {
            return 0..0;
        }
        let first = (from + self.padding + 1).saturating_sub(self.reach()).div_ceil(self.stride).min(count);
        let last = ((to - 1 + self.padding) / self.stride + 1).clamp(first, count);
        first..last
    }

    /// The indices that windows `from..to` read, without the padding.
    pub(super) fn needed(&self, from: usize, to: usize, n: usize) -> Range<usize> {
        if from >= to {
            return 0..0;
        }
        let start = (from * self.stride).saturating_sub(self.padding).min(n);
        let end = ((to - 1) * self.stride + self.reach()).saturating_sub(self.padding).clamp(start, n);
        start..end
    }
}

//! Options of convolutions.

/// A number for all spatial dimensions, or one for each: converts from `usize` and from `[usize; N]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerDim {
    numbers: [usize; 3],
    /// How many are given; 1 is for all dimensions.
    count: usize,
}

impl From<usize> for PerDim {
    fn from(number: usize) -> Self {
        PerDim { numbers: [number; 3], count: 1 }
    }
}

macro_rules! from_arrays {
    ($($N:literal)*) => {$(
        impl From<[usize; $N]> for PerDim {
            fn from(given: [usize; $N]) -> Self {
                let mut numbers = [given[0]; 3];
                numbers[..$N].copy_from_slice(&given);
                PerDim { numbers, count: $N }
            }
        }
    )*};
}
from_arrays!(1 2 3);

impl PerDim {
    /// The numbers as they were given: one for all dimensions, or one for each.
    pub(crate) fn given(&self) -> &[usize] {
        &self.numbers[..self.count]
    }

    /// One number per spatial dimension; `None` if another number of them is given, or there are more than three dimensions.
    pub(crate) fn of(&self, spatial: usize) -> Option<&[usize]> {
        self.numbers.get(..spatial).filter(|_| self.count == 1 || self.count == spatial)
    }
}

/// Options of a convolution: numbers for all spatial dimensions, or arrays with one number for each.
///
/// PyTorch passes them as separate arguments, with the same defaults.
///
/// ```
/// use shardwise::ops::ConvOptions;
///
/// let same = ConvOptions { padding: 1, ..ConvOptions::default() };
/// let wide = ConvOptions { stride: [1, 2], padding: [0, 3], dilation: [1, 1], groups: 1 };
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvOptions<D = usize> {
    /// Distance between windows.
    pub stride: D,
    /// Zeros added on both sides of each spatial dimension.
    pub padding: D,
    /// Distance between the elements of a window.
    pub dilation: D,
    /// Number of groups of channels; each output channel sees the input channels of its group only.
    pub groups: usize,
}

impl Default for ConvOptions {
    fn default() -> Self {
        ConvOptions { stride: 1, padding: 0, dilation: 1, groups: 1 }
    }
}

/// Options of a transposed convolution: numbers for all spatial dimensions, or arrays with one number for each.
///
/// Named and meant as those of the convolution that it is the gradient of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvTransposeOptions<D = usize> {
    /// Distance between windows.
    pub stride: D,
    /// Elements removed from both sides of each spatial dimension.
    pub padding: D,
    /// Elements added after each spatial dimension; less than the stride or the dilation.
    pub output_padding: D,
    /// Distance between the elements of a window.
    pub dilation: D,
    /// Number of groups of channels; each input channel contributes to the output channels of its group only.
    pub groups: usize,
}

impl Default for ConvTransposeOptions {
    fn default() -> Self {
        ConvTransposeOptions { stride: 1, padding: 0, output_padding: 0, dilation: 1, groups: 1 }
    }
}

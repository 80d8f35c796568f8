//! Windows along one spatial dimension, and the taps of a convolution in either direction.

/// The windows of a convolution or pooling along one spatial dimension of local tensors.
///
/// Window `p` reads the input at `p * stride + k * dilation + base` for `k` in `0..kernel`; what is outside of `0..input` is
/// padding. `base` is minus the padding if the local tensors are whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowAxis {
    /// Elements of a window.
    pub kernel: usize,
    /// Distance between windows; at least 1.
    pub stride: usize,
    /// Distance between the elements of a window; at least 1.
    pub dilation: usize,
    /// Index in the input of the first element of window 0.
    pub base: isize,
    /// Size of the input.
    pub input: usize,
    /// Number of windows.
    pub output: usize,
}

impl WindowAxis {
    /// A dimension of size 1 that windows do not extend over.
    pub const UNIT: WindowAxis = WindowAxis { kernel: 1, stride: 1, dilation: 1, base: 0, input: 1, output: 1 };

    /// Index in the input of element `k` of window `p`; outside of `0..input` in the padding.
    #[inline(always)]
    pub(crate) fn index(&self, p: usize, k: usize) -> isize {
        (p * self.stride + k * self.dilation) as isize + self.base
    }

    /// The windows of which element `k` is inside of the input.
    #[inline(always)]
    pub(crate) fn inside(&self, k: usize) -> std::ops::Range<usize> {
        let offset = (k * self.dilation) as isize + self.base;
        valid(offset, self.stride, self.input, self.output)
    }
}

/// The `j` of `0..count` for which `j * step + offset` is in `0..size`.
#[inline(always)]
pub(super) fn valid(offset: isize, step: usize, size: usize, count: usize) -> std::ops::Range<usize> {
    let up = |n: isize| if n <= 0 { 0 } else { (n as usize).div_ceil(step).min(count) };
    let start = up(-offset);
    start..up(size as isize - offset).max(start)
}

/// The windows of a convolution of local tensors: depth, height and width (missing dimensions are [`WindowAxis::UNIT`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvGeometry {
    /// Depth, height, width.
    pub axes: [WindowAxis; 3],
    /// Groups of channels that are convolved separately.
    pub groups: usize,
}

impl ConvGeometry {
    /// The geometry of one to three spatial dimensions.
    ///
    /// # Panics
    /// If there are more than three.
    pub fn new(axes: &[WindowAxis], groups: usize) -> Self {
        let mut all = [WindowAxis::UNIT; 3];
        all[3 - axes.len()..].copy_from_slice(axes);
        for axis in &mut all {
            // The distance of one window, or of one element, to the next is not used, and may not be addressable.
            axis.stride = if axis.output <= 1 { 1 } else { axis.stride };
            axis.dilation = if axis.kernel <= 1 { 1 } else { axis.dilation };
        }
        ConvGeometry { axes: all, groups }
    }

    /// Elements of a window.
    pub(super) fn window(&self) -> usize {
        self.axes.iter().map(|a| a.kernel).product()
    }

    pub(super) fn inputs(&self) -> usize {
        self.axes.iter().map(|a| a.input).product()
    }

    pub(super) fn outputs(&self) -> usize {
        self.axes.iter().map(|a| a.output).product()
    }
}

/// Along one dimension, results `start + j * gap` for `j` in `0..count`, each of which reads the source at `j * step + offset`
/// for every tap.
#[derive(Debug, Clone)]
pub(super) struct TapAxis {
    pub(super) start: usize,
    pub(super) gap: usize,
    pub(super) count: usize,
    pub(super) step: usize,
    pub(super) source: usize,
    /// Per tap the element of the window and the offset.
    pub(super) taps: Vec<(usize, isize)>,
}

impl TapAxis {
    /// The taps of a convolution.
    pub(super) fn forward(axis: &WindowAxis) -> Self {
        let taps = (0..axis.kernel).map(|k| (k, (k * axis.dilation) as isize + axis.base)).collect();
        TapAxis { start: 0, gap: 1, count: axis.output, step: axis.stride, source: axis.input, taps }
    }

    /// The taps of a transposed convolution. Elements of the input whose indices differ by a multiple of the stride are read by
    /// the same elements of windows, so each remainder is a convolution with a stride of 1 of its own.
    pub(super) fn transposed(axis: &WindowAxis) -> Vec<Self> {
        let stride = axis.stride.min(axis.input.max(1));
        let phase = |start: usize| {
            let tap = |k: usize| {
                let distance = start as isize - axis.base - (k * axis.dilation) as isize;
                let step = axis.stride as isize;
                (distance.rem_euclid(step) == 0).then(|| (k, distance.div_euclid(step)))
            };
            let count = axis.input.saturating_sub(start).div_ceil(axis.stride);
            let taps = (0..axis.kernel).filter_map(tap).collect();
            TapAxis { start, gap: axis.stride, count, step: 1, source: axis.output, taps }
        };
        (0..stride).map(phase).collect()
    }
}

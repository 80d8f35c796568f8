//! Resampling of spatial dimensions: interpolation to another size, sampling at the points of a grid, padding that repeats
//! elements.
//!
//! Interpolation works one dimension after the other: each output is a weighted sum of a few slices. If a resampled or padded
//! dimension is sharded, ranks exchange the borders of their shards.

use std::panic::Location;

use candle_core::DType;

use crate::comm::record_implicit_operator;
use crate::error::{ErrorKind, Result};
use crate::ops::shapes::arrange::signed;
use crate::ops::shapes::slice_sums::sum_type;
use crate::ops::spatial::windows::positions;
use crate::ops::{OpEntry, SampleInput};
use crate::tensor::{DTensor, Number, check_whole};
use shardwise_kernels::SliceTable;

/// How [`interpolate`](DTensor::interpolate) computes new elements, PyTorch's `mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Interpolation {
    /// The element at the rounded down position.
    Nearest,
    /// The element nearest to the middle of the new one.
    NearestExact,
    /// Linear in every dimension: `linear`, `bilinear` or `trilinear`.
    Linear,
    /// Cubic in both dimensions.
    Bicubic,
    /// The mean of the elements that the new one covers.
    Area,
}

/// How [`pad_with`](DTensor::pad_with) fills the border, PyTorch's `mode`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum PadMode {
    /// A number.
    Constant(Number),
    /// The mirror image without the border element.
    Reflect,
    /// The border element.
    Replicate,
    /// The elements of the other end.
    Circular,
}

/// How [`grid_sample`](DTensor::grid_sample) computes the element at a point, PyTorch's `mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GridMode {
    /// Linear in every dimension.
    Bilinear,
    /// The nearest element.
    Nearest,
    /// Cubic in both dimensions.
    Bicubic,
}

/// What [`grid_sample`](DTensor::grid_sample) has outside of the image, PyTorch's `padding_mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GridPadding {
    /// Zeros.
    Zeros,
    /// The border element.
    Border,
    /// The mirror image.
    Reflection,
}

/// Options of [`interpolate`](DTensor::interpolate).
#[derive(Debug, Clone, PartialEq)]
pub struct InterpolateOptions {
    /// How new elements are computed.
    pub mode: Interpolation,
    /// Whether the first and last elements keep their places, instead of the outer borders of both.
    pub align_corners: bool,
    /// The factors by which sizes grow, used for positions in place of the ratio of sizes; PyTorch's `scale_factor` unless
    /// `recompute_scale_factor`.
    pub scale_factor: Option<Vec<f64>>,
}

impl Default for InterpolateOptions {
    fn default() -> Self {
        InterpolateOptions { mode: Interpolation::Nearest, align_corners: false, scale_factor: None }
    }
}

/// The constant of cubic interpolation, as in PyTorch.
const CUBIC: f64 = -0.75;

/// The weights of the four neighbours of a point at distance `t` after the second.
fn cubic_weights(t: f64) -> [f64; 4] {
    let near = |x: f64| ((CUBIC + 2.0) * x - (CUBIC + 3.0)) * x * x + 1.0;
    let far = |x: f64| ((CUBIC * x - 5.0 * CUBIC) * x + 8.0 * CUBIC) * x - 4.0 * CUBIC;
    [far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t)]
}

/// Per new element the old ones that it is the weighted sum of, with their weights.
fn weights(
    mode: Interpolation,
    n: usize,
    to: usize,
    align_corners: bool,
    factor: Option<f64>,
) -> Vec<Vec<(usize, f64)>> {
    let ratio = match (align_corners, factor) {
        (true, _) if to > 1 => (n as f64 - 1.0) / (to as f64 - 1.0),
        (true, _) => 0.0,
        (false, Some(factor)) if factor > 0.0 => 1.0 / factor,
        _ => n as f64 / to as f64,
    };
    let last = n.saturating_sub(1);
    let middle = |i: usize| if align_corners { i as f64 * ratio } else { (i as f64 + 0.5) * ratio - 0.5 };
    let one = |i: usize| match mode {
        Interpolation::Nearest => vec![(((i as f64 * ratio).floor() as usize).min(last), 1.0)],
        Interpolation::NearestExact => vec![((((i as f64 + 0.5) * ratio).floor() as usize).min(last), 1.0)],
        Interpolation::Linear => {
            let x = middle(i).max(0.0);
            let low = (x.floor() as usize).min(last);
            let t = x - low as f64;
            vec![(low, 1.0 - t), ((low + 1).min(last), t)]
        }
        Interpolation::Bicubic => {
            let x = middle(i);
            let low = x.floor();
            let at = |k: isize| (low as isize + k).clamp(0, last as isize) as usize;
            let weights = cubic_weights(x - low);
            (0..4).map(|k| (at(k as isize - 1), weights[k])).collect()
        }
        Interpolation::Area => {
            let (from, end) = (i * n / to, ((i + 1) * n).div_ceil(to));
            (from..end).map(|at| (at, 1.0 / (end - from) as f64)).collect()
        }
    };
    (0..to).map(one).collect()
}

/// Words that the sources and weights of one element of the result take, with the vector that holds them.
const ROW_WORDS: usize = 11;

impl DTensor {
    /// Resamples the last dimensions to `sizes`.
    ///
    /// PyTorch's `interpolate`, `upsample_nearest` and `upsample_bilinear`. If a resampled dimension is sharded, ranks exchange the
    /// slices at the borders of their shards, and the result is sharded on it with the sizes that follow; else nothing is
    /// communicated. Integers are rounded to the nearest.
    #[doc(alias = "upsample")]
    #[doc(alias = "upsample_bilinear")]
    #[doc(alias = "upsample_nearest")]
    #[track_caller]
    pub fn interpolate(&self, sizes: &[usize], options: &InterpolateOptions) -> Result<DTensor> {
        let spatial = sizes.len();
        let lead = self.ndim().checked_sub(spatial).filter(|_| spatial > 0);
        let own = lead.map_or(&[][..], |lead| &self.shape()[lead..]);
        let Some(lead) = lead.filter(|_| !own.contains(&0) && !sizes.contains(&0)) else {
            let found = format!("sizes {sizes:?} in interpolate of {}", self.layout());
            let needed = "one size of at least 1 per spatial dimension, and elements to resample";
            return Err(ErrorKind::Argument.error("sizes", found, needed, "correct the sizes"));
        };
        let copies = matches!(options.mode, Interpolation::Nearest | Interpolation::NearestExact);
        let wide = match self.dtype().is_float() {
            _ if copies => self.dtype(),
            true => sum_type(self.dtype()),
            false => DType::F64,
        };
        let mut x = self.to_dtype(wide)?;
        for (s, &to) in sizes.iter().enumerate() {
            check_whole(&[to, ROW_WORDS], DType::F64)?;
            let factor = options.scale_factor.as_ref().and_then(|all| all.get(s).or(all.first()).copied());
            let rows = weights(options.mode, own[s], to, options.align_corners, factor);
            x = x.slice_sums("interpolate", lead + s, SliceTable::new(own[s], rows))?;
        }
        if !copies && !self.dtype().is_float() {
            x = x.round()?;
        }
        x.to_dtype(self.dtype())
    }

    /// Pads the last dimensions: `(before, after)` per dimension, from the last dimension backwards as in PyTorch. A negative number
    /// removes elements.
    ///
    /// A constant border communicates as [`pad`](Self::pad) does. A border that repeats elements is computed by the ranks that hold the ends
    /// of a sharded dimension; a circular one is sent to the other end.
    ///
    /// # Errors
    /// If a border is longer than the elements that it repeats, or more is removed than there is.
    #[track_caller]
    pub fn pad_with(&self, border: &[(isize, isize)], mode: PadMode) -> Result<DTensor> {
        let wrong = |needed: &str| {
            let found = format!("borders {border:?} in pad_with of {}", self.layout());
            ErrorKind::Argument.error("borders", found, needed.to_string(), "correct the borders")
        };
        if border.len() > self.ndim() {
            return Err(wrong("at most one border per dimension"));
        }
        let mut x = self.clone();
        for (i, &(before, after)) in border.iter().enumerate() {
            let dim = self.ndim() - 1 - i;
            let n = x.shape()[dim] as isize;
            if before == 0 && after == 0 {
                continue;
            }
            let Some(size) = n.checked_add(before).and_then(|size| size.checked_add(after)) else {
                return Err(wrong("borders that memory can address"));
            };
            if size < 0 || before < -n || after < -n {
                return Err(wrong("borders that remove no more than there is"));
            }
            check_whole(&[size as usize], self.dtype())?;
            if mode == PadMode::Circular && (before < 0 || after < 0) {
                // What is left is repeated.
                let (cut, end) = ((-before).max(0), n - (-after).max(0));
                x = x.slice(dim as isize, cut, Some(end.max(cut)), 1)?;
                let rest = [vec![(0, 0); i], vec![(before.max(0), after.max(0))]].concat();
                x = x.pad_with(&rest, mode)?;
                continue;
            }
            if let PadMode::Constant(value) = mode {
                let (cut, end) = ((-before).max(0), n - (-after).max(0));
                x = x.slice(dim as isize, cut, Some(end.max(cut)), 1)?;
                let one = (before.max(0) as usize, after.max(0) as usize);
                // Where more is removed than is left, the other border is shortened.
                let surplus = (cut - end).max(0) as usize;
                let one = (one.0.saturating_sub(surplus), one.1.saturating_sub(surplus.saturating_sub(one.0)));
                x = x.pad(&[vec![(0, 0); i], vec![one]].concat(), value)?;
                continue;
            }
            let fits = match mode {
                PadMode::Reflect => before < n && after < n,
                PadMode::Circular => before <= n && after <= n,
                _ => n > 0 || before <= 0 && after <= 0,
            };
            if !fits {
                return Err(wrong("borders no longer than what they repeat"));
            }
            if mode == PadMode::Circular {
                x = x.with_other_ends(dim, before as usize, after as usize)?;
                continue;
            }
            let source = |at: isize| match mode {
                PadMode::Reflect if at < 0 => -at,
                PadMode::Reflect if at >= n => 2 * (n - 1) - at,
                _ => at.clamp(0, n - 1),
            };
            let rows = (-before..n + after).map(|at| [(source(at) as usize, 1.0)]);
            x = x.slice_sums("pad_with", dim, SliceTable::new(n as usize, rows))?;
        }
        Ok(x)
    }

    /// Joins the last slices of a dimension before its first, and the first after its last.
    #[track_caller]
    fn with_other_ends(&self, dim: usize, before: usize, after: usize) -> Result<DTensor> {
        let (n, site) = (self.shape()[dim], Location::caller());
        // Copies of the ends along the axes that shard the dimension: the joined tensor stays where it is.
        let end = |start: usize, len: usize| -> Result<DTensor> {
            let slices = self.narrow(dim as isize, start, len)?;
            let whole = slices.layout().without_axes(slices.layout().shard_order(dim))?;
            record_implicit_operator("pad_with", || slices.to_layout_at(&whole, site))
        };
        let (front, back) = (end(n - before, before)?, end(0, after)?);
        let parts = [(before, &front), (1, self), (after, &back)];
        let parts: Vec<&DTensor> = parts.iter().filter(|(len, _)| *len > 0).map(|(_, part)| *part).collect();
        DTensor::cat(&parts, dim as isize)
    }

    /// Samples images `[n, channels, height, width]` (or with a depth before them) at the points of a grid `[n, .., 2]` (or 3):
    /// coordinates from -1 to 1, the last spatial dimension first.
    ///
    /// The image is flattened and looked up by index, so that sharded spatial dimensions give partial sums; points may stay sharded.
    #[doc(alias = "grid_sampler_2d")]
    #[doc(alias = "grid_sampler_3d")]
    #[track_caller]
    pub fn grid_sample(
        &self,
        grid: &DTensor,
        mode: GridMode,
        padding: GridPadding,
        align_corners: bool,
    ) -> Result<DTensor> {
        let spatial = self.ndim().saturating_sub(2);
        let fits = self.ndim() == grid.ndim()
            && matches!(spatial, 2 | 3)
            && grid.shape().last() == Some(&spatial)
            && grid.shape()[0] == self.shape()[0]
            && !(mode == GridMode::Bicubic && spatial == 3);
        if !fits {
            let found = format!("{} at a grid {} in grid_sample", self.layout(), grid.layout());
            let needed = "[n, channels, ..] of two or three spatial dimensions and a grid [n, .., 2 or 3]";
            return Err(ErrorKind::shape(grid.shape()).error("operands", found, needed, "reshape the operands"));
        }
        let (image, grid) = (&self.without_partials("grid_sample", &[])?, &grid.without_partials("grid_sample", &[])?);
        let sizes = &self.shape()[2..];
        let axis = |s: usize| -> Result<GridAxis> {
            // The last spatial dimension has the first coordinate.
            let x = grid.select(-1, (spatial - 1 - s) as isize)?;
            GridAxis::new(&x, sizes[s], mode, padding, align_corners)
        };
        let axes = (0..spatial).map(axis).collect::<Result<Vec<_>>>()?;
        let (n, channels, volume) = (self.shape()[0], self.shape()[1], sizes.iter().product::<usize>());
        let points: usize = grid.shape()[1..=spatial].iter().product();
        let flat = image.reshape(&[n as isize, channels as isize, volume as isize])?;
        let wide = [n as isize, channels as isize, points as isize];
        let taps: Vec<usize> = axes.iter().map(|a| a.places.len()).collect();
        let mut sum: Option<DTensor> = None;
        for tap in positions(&taps) {
            let (mut place, mut weight): (Option<DTensor>, Option<DTensor>) = (None, None);
            for (s, &k) in tap.iter().enumerate() {
                let (at, factor) = (&axes[s].places[k], &axes[s].weights[k]);
                place = Some(match place {
                    Some(place) => place.mul_scalar(sizes[s] as i64)?.add(at)?,
                    None => at.clone(),
                });
                weight = Some(weight.map_or(Ok(factor.clone()), |weight| weight.mul(factor))?);
            }
            let (place, weight) = (place.expect("a spatial dimension"), weight.expect("a spatial dimension"));
            let rows = [n as isize, 1, points as isize];
            let picked = flat.gather(2, &place.reshape(&rows)?.expand(&wide)?)?;
            let term = picked.mul(&weight.reshape(&rows)?)?;
            sum = Some(sum.map_or(Ok(term.clone()), |sum| sum.add(&term))?);
        }
        let shape = [&self.shape()[..2], &grid.shape()[1..=spatial]].concat();
        sum.expect("at least one neighbour").reshape(&signed(&shape))
    }
}

/// The elements of one dimension that each point of a grid is the weighted sum of, and their weights; the weight of one outside is 0.
struct GridAxis {
    places: Vec<DTensor>,
    weights: Vec<DTensor>,
}

impl GridAxis {
    #[track_caller]
    fn new(x: &DTensor, n: usize, mode: GridMode, padding: GridPadding, align_corners: bool) -> Result<Self> {
        let size = n as f64;
        // From -1..1 to positions of elements.
        let at = match align_corners {
            true => x.add_scalar(1.0)?.mul_scalar((size - 1.0) / 2.0)?,
            false => x.add_scalar(1.0)?.mul_scalar(size)?.add_scalar(-1.0)?.mul_scalar(0.5)?,
        };
        let folded = |at: &DTensor| -> Result<DTensor> {
            match padding {
                GridPadding::Zeros => Ok(at.clone()),
                GridPadding::Border => at.clamp_inside(0.0, size - 1.0),
                GridPadding::Reflection => {
                    let (low, high) = if align_corners { (0.0, size - 1.0) } else { (-0.5, size - 0.5) };
                    at.reflected(low, high)?.clamp_inside(0.0, size - 1.0)
                }
            }
        };
        let tap = |at: &DTensor, weight: DTensor| -> Result<(DTensor, DTensor)> {
            let inside = at.ge(0.0)?.logical_and(&at.le(size - 1.0)?)?;
            let place = inside.where_cond(at, 0.0)?.detach().to_dtype(DType::I64)?;
            Ok((place, inside.where_cond(&weight, 0.0)?))
        };
        let taps = match mode {
            GridMode::Nearest => {
                let near = folded(&at)?.detach().round()?;
                vec![tap(&near, near.ones_like()?)?]
            }
            GridMode::Bilinear => {
                let at = folded(&at)?;
                let low = at.detach().floor()?;
                let t = at.sub(&low)?;
                vec![tap(&low, t.rsub_scalar(1.0)?)?, tap(&low.add_scalar(1.0)?, t)?]
            }
            GridMode::Bicubic => {
                // The neighbours are folded, not the point.
                let low = at.detach().floor()?;
                let t = at.sub(&low)?;
                let near = |x: &DTensor| -> Result<DTensor> {
                    x.mul_scalar(CUBIC + 2.0)?.add_scalar(-(CUBIC + 3.0))?.mul(&x.square()?)?.add_scalar(1.0)
                };
                let far = |x: &DTensor| -> Result<DTensor> {
                    let inner = x.mul_scalar(CUBIC)?.add_scalar(-5.0 * CUBIC)?.mul(x)?.add_scalar(8.0 * CUBIC)?;
                    inner.mul(x)?.add_scalar(-4.0 * CUBIC)
                };
                let weights =
                    [far(&t.add_scalar(1.0)?)?, near(&t)?, near(&t.rsub_scalar(1.0)?)?, far(&t.rsub_scalar(2.0)?)?];
                let each = |(k, weight): (usize, DTensor)| tap(&folded(&low.add_scalar(k as f64 - 1.0)?)?, weight);
                weights.into_iter().enumerate().map(each).collect::<Result<Vec<_>>>()?
            }
        };
        let (places, weights) = taps.into_iter().unzip();
        Ok(GridAxis { places, weights })
    }
}

impl DTensor {
    /// Clamps with gradient 0 at the bounds, as PyTorch's grid sampler does.
    #[track_caller]
    fn clamp_inside(&self, low: f64, high: f64) -> Result<DTensor> {
        self.hardtanh(low, high)
    }

    /// Folds positions back into an interval by mirroring at its ends.
    #[track_caller]
    fn reflected(&self, low: f64, high: f64) -> Result<DTensor> {
        if low == high {
            return self.mul_scalar(0.0);
        }
        let span = high - low;
        let from_low = self.add_scalar(-low)?;
        let distance = from_low.lt(0.0)?.where_cond(&from_low.neg()?, &from_low)?;
        let flips = distance.detach().div_scalar(span)?.floor()?;
        let extra = distance.sub(&flips.mul_scalar(span)?)?;
        let even = flips.remainder(2.0)?.eq(0.0)?;
        even.where_cond(&extra.add_scalar(low)?, &extra.rsub_scalar(span + low)?)
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry {
        name: "interpolate",
        samples: plane,
        apply: |x| {
            use Interpolation::{Area, Bicubic, Linear, Nearest, NearestExact};
            let modes = [Nearest, NearestExact, Linear, Bicubic, Area];
            modes
                .iter()
                .map(|&mode| x[0].interpolate(&[4, 7], &InterpolateOptions { mode, ..Default::default() }))
                .collect()
        },
    },
    OpEntry {
        name: "pad_with",
        samples: plane,
        apply: |x| {
            let modes = [PadMode::Constant(2.into()), PadMode::Reflect, PadMode::Replicate, PadMode::Circular];
            modes.iter().map(|&mode| x[0].pad_with(&[(1, 2), (-1, 1)], mode)).collect()
        },
    },
    OpEntry {
        name: "grid_sample",
        samples: grids,
        apply: |x| {
            let modes = [GridMode::Bilinear, GridMode::Nearest, GridMode::Bicubic];
            modes.iter().map(|&mode| x[0].grid_sample(&x[1], mode, GridPadding::Reflection, false)).collect()
        },
    },
];

fn plane() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[2, 2, 6, 5], DType::F64)]]
}

fn grids() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[2, 2, 3, 4], DType::F64), SampleInput::new(&[2, 3, 2, 2], DType::F64)]]
}

//! Windows of spatial dimensions with every option of PyTorch: pools with `ceil_mode`, dilation and indices, adaptive and
//! fractional pools, unpooling, `im2col`.
//!
//! A table lists per dimension the elements of each window. Means are sums along one dimension after the other and store no
//! windows; maxima, of which the place is returned too, are those of gathered windows. If a spatial dimension is sharded, ranks
//! exchange the borders of their shards, as the plain pools of `convolution` do.

use candle_core::{DType, Device, Tensor};

use crate::error::{ErrorKind, Result};
use crate::ops::shapes::arrange::{one_mesh, signed};
use crate::ops::shapes::slice_sums::{EmptyRow, sum_type};
use crate::ops::{OpEntry, SampleInput};
use crate::tensor::{DTensor, check_whole};
use shardwise_kernels::SliceTable;

/// Options of a pool, with one number for all spatial dimensions or one for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolOptions {
    /// Size of a window.
    pub kernel_size: Vec<usize>,
    /// Distance between windows; empty: the size of a window.
    pub stride: Vec<usize>,
    /// Elements added on both sides: zeros for a mean, and never the maximum.
    pub padding: Vec<usize>,
    /// Distance between the elements of a window; 1 for means.
    pub dilation: Vec<usize>,
    /// Whether the last window may begin inside and end outside of the padded dimension.
    pub ceil_mode: bool,
    /// Whether a mean divides by the padding too.
    pub count_include_pad: bool,
    /// What a mean divides by instead of the size of its window.
    pub divisor_override: Option<i64>,
}

impl PoolOptions {
    /// Windows of one size without padding, one next to the other.
    pub fn new(kernel_size: &[usize]) -> Self {
        PoolOptions {
            kernel_size: kernel_size.to_vec(),
            stride: Vec::new(),
            padding: vec![0],
            dilation: vec![1],
            ceil_mode: false,
            count_include_pad: true,
            divisor_override: None,
        }
    }
}

impl PoolOptions {
    /// The sizes of the spatial dimensions before a pool with these options gave `pooled`: what [`DTensor::max_unpool`] takes if PyTorch's
    /// `output_size` is not given.
    pub fn unpooled_sizes(&self, pooled: &[usize]) -> Vec<usize> {
        let one = |(s, &n): (usize, &usize)| {
            let size = per_dim(&self.kernel_size, s, 1);
            let whole = n.saturating_sub(1) * per_dim(&self.stride, s, size) + size;
            whole.saturating_sub(2 * per_dim(&self.padding, s, 0))
        };
        pooled.iter().enumerate().map(one).collect()
    }
}

/// Words that a window of one element takes in a [`WindowTable`]: a vector, its element and its size.
const WINDOW_WORDS: usize = 6;

/// The windows of one dimension.
struct WindowTable {
    /// Size of the dimension.
    n: usize,
    /// Per window its elements; `None` for one outside of the dimension.
    windows: Vec<Vec<Option<usize>>>,
    /// Per window the size that a mean divides by if it counts the padding.
    padded: Vec<usize>,
}

impl WindowTable {
    /// The most elements of a window.
    fn width(&self) -> usize {
        self.windows.iter().map(Vec::len).max().unwrap_or(0)
    }

    fn count(&self) -> usize {
        self.windows.len()
    }

    /// The elements of all windows in order, each window filled up to the same number.
    fn elements(&self) -> impl Iterator<Item = Option<usize>> {
        let width = self.width();
        self.windows.iter().flat_map(move |window| (0..width).map(|i| window.get(i).copied().flatten()))
    }

    /// The sums of all windows.
    fn sums(&self) -> SliceTable {
        SliceTable::new(self.n, self.windows.iter().map(|window| window.iter().flatten().map(|&at| (at, 1.0))))
    }

    fn adaptive(n: usize, count: usize) -> Self {
        let window = |i: usize| (i * n / count..((i + 1) * n).div_ceil(count)).map(Some).collect::<Vec<_>>();
        let windows: Vec<Vec<Option<usize>>> = (0..count).map(window).collect();
        let padded = windows.iter().map(Vec::len).collect();
        WindowTable { n, windows, padded }
    }

    /// The windows of a fractional pool: `sample` from 0 to 1 decides where they begin.
    fn fractional(n: usize, count: usize, size: usize, sample: f64) -> Self {
        let alpha = if count > 1 { (n - size) as f64 / (count - 1) as f64 } else { 0.0 };
        let begin = |i: usize| match i + 1 == count {
            true => n - size,
            false => {
                (((i as f64 + sample) * alpha) as i64 - (sample * alpha) as i64).clamp(0, (n - size) as i64) as usize
            }
        };
        let windows = (0..count).map(|i| (begin(i)..begin(i) + size).map(Some).collect()).collect();
        WindowTable { n, windows, padded: vec![size; count] }
    }
}

/// The option of spatial dimension `s`: the only one, or that of the dimension.
pub(in crate::ops) fn per_dim(list: &[usize], s: usize, default: usize) -> usize {
    match list {
        [] => default,
        [one] => *one,
        many => many.get(s).copied().unwrap_or(default),
    }
}

impl PoolOptions {
    /// The windows of all spatial dimensions, the last of `shape`.
    fn tables(&self, name: &'static str, shape: &[usize], spatial: usize) -> Result<Vec<WindowTable>> {
        let first = shape.len() - spatial;
        let fits = |list: &[usize]| list.len() <= 1 || list.len() == spatial;
        let lists = [&self.kernel_size, &self.stride, &self.padding, &self.dilation];
        let wrong = |needed: &str| {
            let found = format!("{self:?} for shape {shape:?} in {name}");
            ErrorKind::Argument.error("pool options", found, needed.to_string(), "correct the options")
        };
        if self.kernel_size.is_empty() || !lists.iter().all(|list| fits(list)) {
            return Err(wrong("one number, or one per spatial dimension"));
        }
        let table = |s: usize| {
            let n = shape[first + s];
            let size = per_dim(&self.kernel_size, s, 1);
            let (stride, padding) = (per_dim(&self.stride, s, size), per_dim(&self.padding, s, 0));
            let dilation = per_dim(&self.dilation, s, 1);
            if size == 0 || stride == 0 || dilation == 0 || padding > size / 2 {
                return Err(wrong("sizes, strides and dilations of at least 1, and padding of half a window at most"));
            }
            let fits = || {
                let reach = dilation.checked_mul(size - 1)?.checked_add(1)?;
                Some((reach, n.checked_add(2 * padding)?.checked_sub(reach)?))
            };
            let Some((reach, room)) = fits() else {
                return Err(wrong("a window that fits into the padded dimension"));
            };
            let mut count = if self.ceil_mode { room.div_ceil(stride) } else { room / stride } + 1;
            if self.ceil_mode && (count - 1) * stride >= n + padding {
                count -= 1;
            }
            let inside = |at: usize| at.checked_sub(padding).filter(|&i| i < n);
            let window = |w: usize| (0..size).map(|i| inside(w * stride + i * dilation)).collect();
            let padded = |w: usize| (w * stride + reach).min(n + 2 * padding) - w * stride;
            Ok(WindowTable { n, windows: (0..count).map(window).collect(), padded: (0..count).map(padded).collect() })
        };
        (0..spatial).map(table).collect()
    }
}

impl DTensor {
    /// Averages over windows of the last `spatial` dimensions, with all options of PyTorch's `avg_pool1d`, `2d` and `3d`.
    ///
    /// If a spatial dimension is sharded, ranks exchange the borders that windows reach over.
    #[doc(alias = "avg_pool3d")]
    #[track_caller]
    pub fn avg_pool(&self, spatial: usize, options: &PoolOptions) -> Result<DTensor> {
        self.check_spatial("avg_pool", spatial)?;
        let tables = options.tables("avg_pool", self.shape(), spatial)?;
        let divisor = |at: &[usize]| match (options.divisor_override, options.count_include_pad) {
            (Some(divisor), _) => divisor as f64,
            (None, true) => at.iter().zip(&tables).map(|(&w, t)| t.padded[w] as f64).product(),
            (None, false) => {
                at.iter().zip(&tables).map(|(&w, t)| t.windows[w].iter().flatten().count() as f64).product()
            }
        };
        self.window_means("avg_pool", &tables, &divisor)
    }

    /// Takes the maximum over windows of the last `spatial` dimensions, and returns its index in the flattened spatial dimensions
    /// (i64), with all options of PyTorch's `max_pool1d`, `2d` and `3d`.
    ///
    /// If a spatial dimension is sharded, ranks exchange the borders that windows reach over.
    #[doc(alias = "max_pool3d")]
    #[doc(alias = "return_indices")]
    #[track_caller]
    pub fn max_pool(&self, spatial: usize, options: &PoolOptions) -> Result<(DTensor, DTensor)> {
        self.check_spatial("max_pool", spatial)?;
        self.window_maxima("max_pool", &options.tables("max_pool", self.shape(), spatial)?)
    }

    /// Averages over as many windows per dimension as `sizes` says, which cover the last dimensions; `None` keeps a size.
    #[doc(alias = "adaptive_avg_pool1d")]
    #[doc(alias = "adaptive_avg_pool2d")]
    #[doc(alias = "adaptive_avg_pool3d")]
    #[track_caller]
    pub fn adaptive_avg_pool(&self, sizes: &[Option<usize>]) -> Result<DTensor> {
        let tables = self.adaptive_tables("adaptive_avg_pool", sizes)?;
        let divisor = |at: &[usize]| at.iter().zip(&tables).map(|(&w, t)| t.padded[w] as f64).product();
        self.window_means("adaptive_avg_pool", &tables, &divisor)
    }

    /// Takes the maximum over as many windows per dimension as `sizes` says, and returns its index in the flattened spatial
    /// dimensions (i64); `None` keeps a size.
    #[doc(alias = "adaptive_max_pool1d")]
    #[doc(alias = "adaptive_max_pool2d")]
    #[doc(alias = "adaptive_max_pool3d")]
    #[track_caller]
    pub fn adaptive_max_pool(&self, sizes: &[Option<usize>]) -> Result<(DTensor, DTensor)> {
        self.window_maxima("adaptive_max_pool", &self.adaptive_tables("adaptive_max_pool", sizes)?)
    }

    /// Takes the maximum over windows whose places `samples` decides, from 0 to 1: `[n, channels, spatial]`, in PyTorch drawn at
    /// random. Returns the maxima and their indices in the flattened spatial dimensions (i64).
    ///
    /// Images and channels have windows of their own, so that they are pooled one after the other; the samples are gathered.
    #[doc(alias = "fractional_max_pool2d")]
    #[doc(alias = "fractional_max_pool3d")]
    #[track_caller]
    pub fn fractional_max_pool(
        &self,
        kernel_size: &[usize],
        output_size: &[usize],
        samples: &DTensor,
    ) -> Result<(DTensor, DTensor)> {
        one_mesh("fractional_max_pool", &[self, samples])?;
        let spatial = output_size.len();
        self.check_spatial("fractional_max_pool", spatial)?;
        let lead = self.ndim() - spatial;
        let planes: usize = self.shape()[..lead].iter().product();
        let fits = (0..spatial).all(|s| {
            let (n, size) = (self.shape()[lead + s], per_dim(kernel_size, s, 1));
            output_size[s] >= 1 && output_size[s].checked_add(size).is_some_and(|end| end <= n + 1) && size >= 1
        });
        if !fits || samples.elem_count() != planes * spatial {
            let found = format!(
                "windows of {kernel_size:?}, {output_size:?} of them and samples {:?} in fractional_max_pool of {}",
                samples.shape(),
                self.layout()
            );
            let needed = "windows that fit, and one sample per image, channel and spatial dimension";
            return Err(ErrorKind::Argument.error("windows", found, needed, "correct the sizes"));
        }
        let numbers = match samples.is_readable() {
            false => vec![0.0; samples.elem_count()],
            true => samples.detach().full_tensor()?.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?,
        };
        let flat = self.reshape(&[vec![planes as isize], signed(&self.shape()[lead..])].concat())?;
        let (mut values, mut indices) = (Vec::new(), Vec::new());
        for plane in 0..planes {
            // As in PyTorch the width of an image has the first sample, but the depth of a volume.
            let table = |s: usize| {
                let sample = numbers[plane * spatial + if spatial == 2 { 1 - s } else { s }];
                WindowTable::fractional(self.shape()[lead + s], output_size[s], per_dim(kernel_size, s, 1), sample)
            };
            let tables: Vec<WindowTable> = (0..spatial).map(table).collect();
            let (value, index) = flat.narrow(0, plane, 1)?.window_maxima("fractional_max_pool", &tables)?;
            values.push(value);
            indices.push(index);
        }
        let shape = [signed(&self.shape()[..lead]), signed(output_size)].concat();
        if planes == 0 {
            let empty = self.reshape(&[0])?.reshape(&shape)?;
            return Ok((empty.clone(), empty.to_dtype(DType::I64)?));
        }
        let whole = |parts: &[DTensor]| DTensor::cat(&parts.iter().collect::<Vec<_>>(), 0)?.reshape(&shape);
        Ok((whole(&values)?, whole(&indices)?))
    }

    /// Writes elements to the places of the flattened last dimensions that `indices` names, and zeros to the rest: the inverse of
    /// [`max_pool`](Self::max_pool). `sizes` are those of the result.
    #[doc(alias = "max_unpool1d")]
    #[doc(alias = "max_unpool2d")]
    #[doc(alias = "max_unpool3d")]
    #[track_caller]
    pub fn max_unpool(&self, indices: &DTensor, sizes: &[usize]) -> Result<DTensor> {
        self.check_spatial("max_unpool", sizes.len())?;
        let lead = self.ndim() - sizes.len();
        check_whole(&[&self.shape()[..lead], sizes].concat(), self.dtype())?;
        let volume: usize = sizes.iter().product();
        if indices.shape() != self.shape() {
            let found = format!("indices {} in max_unpool of {}", indices.layout(), self.layout());
            return Err(ErrorKind::shape(indices.shape()).error("indices", found, "one per element", "reshape them"));
        }
        let lead_shape = signed(&self.shape()[..lead]);
        let count: usize = self.shape()[lead..].iter().product();
        let flat = |x: &DTensor| x.reshape(&[lead_shape.clone(), vec![count as isize]].concat());
        let zeros = self.constant(&Tensor::zeros(
            [&self.shape()[..lead], &[volume][..]].concat(),
            self.dtype(),
            &Device::Cpu,
        )?)?;
        let put = zeros.scatter(-1, &flat(indices)?, &flat(self)?)?;
        put.reshape(&[lead_shape, signed(sizes)].concat())
    }

    /// Returns the windows of `[n, channels, ...]` or `[channels, ...]` as columns: `[n, channels * window, windows]`, PyTorch's
    /// `nn.functional.unfold`.
    #[doc(alias = "unfold")]
    #[track_caller]
    pub fn im2col(
        &self,
        kernel_size: &[usize],
        dilation: &[usize],
        padding: &[usize],
        stride: &[usize],
    ) -> Result<DTensor> {
        let spatial = 2;
        self.check_spatial("im2col", spatial)?;
        let axis = |s: usize| {
            let n = self.shape()[self.ndim() - spatial + s];
            let (size, stride) = (per_dim(kernel_size, s, 1), per_dim(stride, s, 1).max(1));
            let (dilation, padding) = (per_dim(dilation, s, 1), per_dim(padding, s, 0));
            let room = || {
                let reach = dilation.checked_mul(size.max(1) - 1)?.checked_add(1)?;
                padding.checked_mul(2)?.checked_add(n)?.checked_sub(reach)
            };
            let Some(room) = room().filter(|_| size > 0 && dilation > 0) else {
                let found = format!("windows of {kernel_size:?} in im2col of {}", self.layout());
                let needed = "a window that fits into the padded image";
                return Err(ErrorKind::Argument.error("window", found, needed, "use a smaller window"));
            };
            // A vector per window, whose elements take two words each.
            let words = (size - 1).saturating_mul(2).saturating_add(WINDOW_WORDS);
            check_whole(&[room / stride + 1, words], DType::F64)?;
            let inside = |at: usize| at.checked_sub(padding).filter(|&i| i < n);
            let window = |w: usize| (0..size).map(|i| inside(w * stride + i * dilation)).collect();
            let windows: Vec<Vec<Option<usize>>> = (0..room / stride + 1).map(window).collect();
            Ok(WindowTable { n, padded: vec![size; windows.len()], windows })
        };
        let tables = (0..spatial).map(axis).collect::<Result<Vec<_>>>()?;
        let lead = self.ndim() - spatial;
        let windows = self.gathered_windows("im2col", &tables, EmptyRow::Zero)?;
        // [.., channels, windows, window] to [.., channels * window, windows]
        let count: usize = tables.iter().map(WindowTable::count).product();
        let size: usize = tables.iter().map(WindowTable::width).product();
        let flat = windows.reshape(&[signed(&self.shape()[..lead]), vec![count as isize, size as isize]].concat())?;
        let swapped = flat.transpose(-2, -1)?;
        let channels = self.shape()[lead - 1] * size;
        swapped.reshape(&[signed(&self.shape()[..lead - 1]), vec![channels as isize, count as isize]].concat())
    }

    /// Takes the norm of order `norm_type` over windows of the last `spatial` dimensions: the root of the sum of powers.
    ///
    /// Communicates as [`avg_pool`](Self::avg_pool) does. Padding, dilation and divisors of the options do not apply.
    #[doc(alias = "lp_pool1d")]
    #[doc(alias = "lp_pool2d")]
    #[doc(alias = "lp_pool3d")]
    #[track_caller]
    pub fn lp_pool(&self, norm_type: f64, spatial: usize, options: &PoolOptions) -> Result<DTensor> {
        let (kernel_size, stride, ceil_mode) = (&options.kernel_size, options.stride.clone(), options.ceil_mode);
        let means = PoolOptions { stride, ceil_mode, ..PoolOptions::new(kernel_size) };
        let means = self.pow_scalar(norm_type)?.avg_pool(spatial, &means)?;
        let volume: usize = (0..spatial).map(|s| per_dim(kernel_size, s, 1)).product();
        // As in PyTorch, whose odd orders may have negative sums.
        means.sign()?.mul(&means.abs()?.relu()?)?.mul_scalar(volume as f64)?.pow_scalar(norm_type.recip())
    }

    fn check_spatial(&self, name: &'static str, spatial: usize) -> Result<()> {
        if spatial > 0 && self.ndim() > spatial {
            return Ok(());
        }
        Err(self.bad_dims(name, &[], &format!("channels and {} spatial dimension(s)", spatial.max(1))))
    }

    fn adaptive_tables(&self, name: &'static str, sizes: &[Option<usize>]) -> Result<Vec<WindowTable>> {
        self.check_spatial(name, sizes.len())?;
        let own = &self.shape()[self.ndim() - sizes.len()..];
        for size in sizes.iter().flatten() {
            check_whole(&[*size, WINDOW_WORDS], DType::F64)?;
        }
        Ok(own.iter().zip(sizes).map(|(&n, size)| WindowTable::adaptive(n, size.unwrap_or(n))).collect())
    }

    /// All windows of the last dimensions: `[.., counts.., window]`.
    #[track_caller]
    fn gathered_windows(&self, name: &'static str, tables: &[WindowTable], outside: EmptyRow) -> Result<DTensor> {
        let (spatial, lead) = (tables.len(), self.ndim() - tables.len());
        let mut x = self.clone();
        for (s, table) in tables.iter().enumerate() {
            x = x.slice_groups(name, lead + 2 * s, table.width(), table.elements(), outside)?;
        }
        // [.., count, width, count, width, ..] to [.., counts.., widths..]
        let order = (0..lead).chain((0..spatial).map(|s| lead + 2 * s)).chain((0..spatial).map(|s| lead + 2 * s + 1));
        let counts: Vec<isize> = tables.iter().map(|t| t.count() as isize).collect();
        let width: usize = tables.iter().map(WindowTable::width).product();
        x.permute(&order.map(|d| d as isize).collect::<Vec<_>>())?
            .reshape(&[signed(&self.shape()[..lead]), counts, vec![width as isize]].concat())
    }

    #[track_caller]
    fn window_means(
        &self,
        name: &'static str,
        tables: &[WindowTable],
        divisor: &dyn Fn(&[usize]) -> f64,
    ) -> Result<DTensor> {
        let lead = self.ndim() - tables.len();
        let mut sums = self.to_dtype(sum_type(self.dtype()))?;
        for (s, table) in tables.iter().enumerate() {
            sums = sums.slice_sums(name, lead + s, table.sums())?;
        }
        let counts: Vec<usize> = tables.iter().map(WindowTable::count).collect();
        let divisors: Vec<f64> = positions(&counts).map(|at| divisor(&at)).collect();
        let divisors = self.constant(&Tensor::from_vec(divisors, counts, &Device::Cpu)?)?.to_dtype(sums.dtype())?;
        let means = if self.dtype().is_float() { sums.div(&divisors)? } else { sums.div_trunc(&divisors)? };
        means.to_dtype(self.dtype())
    }

    #[track_caller]
    fn window_maxima(&self, name: &'static str, tables: &[WindowTable]) -> Result<(DTensor, DTensor)> {
        let windows = self.gathered_windows(name, tables, EmptyRow::Lowest)?;
        let counts: Vec<usize> = tables.iter().map(WindowTable::count).collect();
        if windows.shape().last() == Some(&0) || windows.elem_count() == 0 {
            let empty = windows.sum(&[-1], false)?.to_dtype(self.dtype())?;
            return Ok((empty.clone(), empty.detach().to_dtype(DType::I64)?));
        }
        let (values, at) = windows.max_dim(-1, false)?;
        // The places of all elements of all windows in the flattened dimensions, looked up at the maxima.
        let widths: Vec<usize> = tables.iter().map(WindowTable::width).collect();
        let place = |window: &[usize], element: &[usize]| {
            let one = |s: usize| tables[s].windows[window[s]].get(element[s]).copied().flatten().unwrap_or(0);
            (0..tables.len()).fold(0, |place, s| place * tables[s].n + one(s)) as i64
        };
        let elements: Vec<Vec<usize>> = positions(&widths).collect();
        let places: Vec<i64> = positions(&counts)
            .flat_map(|window| elements.iter().map(move |e| place(&window, e)).collect::<Vec<_>>())
            .collect();
        let shape = [counts.as_slice(), &[elements.len()]].concat();
        let places = self.constant(&Tensor::from_vec(places, shape, &Device::Cpu)?)?;
        let wide = [signed(at.shape()), vec![elements.len() as isize]].concat();
        let indices = places.expand(&wide)?.gather(-1, &at.unsqueeze(-1)?)?.squeeze(Some(-1))?;
        Ok((values, indices))
    }
}

/// All positions in a tensor of these sizes, in row-major order.
pub(in crate::ops) fn positions(sizes: &[usize]) -> impl Iterator<Item = Vec<usize>> + '_ {
    (0..sizes.iter().product::<usize>()).map(|mut i| {
        let mut at = vec![0; sizes.len()];
        for d in (0..sizes.len()).rev() {
            at[d] = i % sizes[d];
            i /= sizes[d];
        }
        at
    })
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry { name: "avg_pool", samples: plane, apply: |x| Ok(vec![x[0].avg_pool(2, &padded())?]) },
    OpEntry {
        name: "max_pool",
        samples: plane,
        apply: |x| {
            let (values, indices) = x[0].max_pool(2, &PoolOptions { dilation: vec![1, 2], ..padded() })?;
            Ok(vec![values, indices])
        },
    },
    OpEntry {
        name: "adaptive_avg_pool",
        samples: plane,
        apply: |x| Ok(vec![x[0].adaptive_avg_pool(&[Some(3), Some(2)])?, x[0].adaptive_avg_pool(&[None])?]),
    },
    OpEntry {
        name: "adaptive_max_pool",
        samples: plane,
        apply: |x| {
            let (values, indices) = x[0].adaptive_max_pool(&[Some(3), None])?;
            Ok(vec![values, indices])
        },
    },
    OpEntry {
        name: "fractional_max_pool",
        samples: sampled,
        apply: |x| {
            let samples = x[1].sigmoid()?;
            let (values, indices) = x[0].fractional_max_pool(&[2], &[3, 2], &samples)?;
            Ok(vec![values, indices])
        },
    },
    OpEntry {
        name: "max_unpool",
        samples: plane,
        apply: |x| {
            let (values, indices) = x[0].max_pool(2, &PoolOptions::new(&[2]))?;
            Ok(vec![values.max_unpool(&indices, &x[0].shape()[x[0].ndim() - 2..])?])
        },
    },
    OpEntry {
        name: "lp_pool",
        samples: plane,
        apply: |x| Ok(vec![x[0].abs()?.lp_pool(3.0, 2, &PoolOptions::new(&[2]))?]),
    },
    OpEntry { name: "im2col", samples: plane, apply: |x| Ok(vec![x[0].im2col(&[2], &[1], &[1], &[2])?]) },
];

fn padded() -> PoolOptions {
    PoolOptions { stride: vec![2], padding: vec![1], ceil_mode: true, ..PoolOptions::new(&[3, 2]) }
}

fn plane() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[2, 2, 6, 5], DType::F64)], vec![SampleInput::new(&[3, 4, 4], DType::F64)]]
}

fn sampled() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[2, 1, 6, 5], DType::F64), SampleInput::new(&[2, 1, 2], DType::F64)]]
}

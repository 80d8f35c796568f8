//! Distributed tensors from a rule: every rank fills in its own part.

use std::panic::Location;

use candle_core::{DType, Device, Shape, Tensor};

use super::{DTensor, check_partial, check_room, foreign};
use crate::comm::{Call, DeviceMesh};
use crate::error::{Error, ErrorKind, RankCall, Result, Site};
use crate::layout::{Layout, Runs, TensorBox, TensorMeta};
use crate::placement::Placement;
use crate::random::{Distribution, Generator, GeneratorState, mantissa_bits};
use shardwise_kernels::{Number, check_dtype, filled, placeholder, reserve};

/// Elements by global index: row-major number of the element, and its index in every dimension.
type Rule<'a> = &'a dyn Fn(u64, &[usize]) -> Number;

impl DTensor {
    /// A tensor filled with one value, which must be one of the type: 300 in u8 or NaN in an integer type is an error; a
    /// fraction is cut off, and a negative integer wraps in an unsigned type, as in PyTorch.
    #[track_caller]
    pub fn full(
        value: impl Into<Number>,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        let layout = Layout::new(mesh.mesh(), shape, placements)?;
        let value = value.into().fit(dtype)?; // on all ranks, also on those that fill nothing
        make(mesh, &layout, dtype, Location::caller(), |meta, _| Ok(filled(value, meta)?))
    }

    /// A tensor of zeros.
    #[track_caller]
    pub fn zeros(
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        Self::full(0.0, shape, dtype, mesh, placements)
    }

    /// A tensor of ones.
    #[track_caller]
    pub fn ones(
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        Self::full(1.0, shape, dtype, mesh, placements)
    }

    /// A tensor to be filled later. Its elements are zero: memory without a value does not exist here.
    #[track_caller]
    pub fn empty(
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        Self::zeros(shape, dtype, mesh, placements)
    }

    /// A tensor whose elements are a function of their index in the whole tensor.
    ///
    /// ```
    /// # use shardwise::prelude::*;
    /// launch(3, |world| {
    ///     let mesh = world.mesh([("dp", 3)])?;
    ///     let table = DTensor::from_fn((4, 4), DType::I64, &mesh, [Shard(1)], |i| (10 * i[0] + i[1]) as f64)?;
    ///     assert_eq!(table.full_tensor()?.to_vec2::<i64>()?[2], [20, 21, 22, 23]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[track_caller]
    pub fn from_fn(
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
        f: impl Fn(&[usize]) -> f64,
    ) -> Result<DTensor> {
        let layout = Layout::new(mesh.mesh(), shape, placements)?;
        by_rule(mesh, &layout, dtype, Location::caller(), &|_, index| Number::Real(f(index)))
    }

    /// The numbers from `start` to before `end` in steps of `step`. Integers are exact in all of i64; for an integer type,
    /// fractions of `start` and `step` are cut off, and numbers that the type does not hold wrap, as in PyTorch.
    #[track_caller]
    pub fn arange(
        start: impl Into<Number>,
        end: impl Into<Number>,
        step: impl Into<Number>,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        let (start, end, step) = (start.into(), end.into(), step.into());
        let count = range_count(start, end, step);
        if !count.is_finite() || step.to_f64() == 0.0 || count > MAX_COUNT {
            return Err(ErrorKind::Argument.error(
                "range",
                format!("{} to {} in steps of {}", start.to_f64(), end.to_f64(), step.to_f64()),
                "finite bounds and a step that leads from one to the other",
                "correct the bounds",
            ));
        }
        let layout = Layout::new(mesh.mesh(), count.max(0.0) as usize, placements)?;
        let rule = |i: u64, _: &[usize]| match dtype.is_float() {
            true => Number::Real(start.to_f64() + i as f64 * step.to_f64()),
            false => Number::Integer(start.to_i64().wrapping_add((i as i64).wrapping_mul(step.to_i64()))),
        };
        by_rule(mesh, &layout, dtype, Location::caller(), &rule)
    }

    /// `steps` numbers at equal distances from `start` to `end`, both included.
    #[track_caller]
    pub fn linspace(
        start: f64,
        end: f64,
        steps: usize,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        let layout = Layout::new(mesh.mesh(), steps, placements)?;
        by_rule(mesh, &layout, dtype, Location::caller(), &|i, _| Number::Real(spaced(start, end, steps, i)))
    }

    /// `steps` powers of `base` with exponents at equal distances from `start` to `end`, both included.
    #[track_caller]
    pub fn logspace(
        start: f64,
        end: f64,
        steps: usize,
        base: f64,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        let layout = Layout::new(mesh.mesh(), steps, placements)?;
        let rule = |i: u64, _: &[usize]| Number::Real(base.powf(spaced(start, end, steps, i)));
        by_rule(mesh, &layout, dtype, Location::caller(), &rule)
    }

    /// A matrix with ones on its diagonal.
    #[track_caller]
    pub fn eye(
        rows: usize,
        columns: usize,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        let layout = Layout::new(mesh.mesh(), (rows, columns), placements)?;
        let rule = |_: u64, index: &[usize]| Number::Integer(i64::from(index[0] == index[1]));
        by_rule(mesh, &layout, dtype, Location::caller(), &rule)
    }

    /// Random elements, drawn from the generator of the mesh. Every layout, mesh and world size gives the same bits.
    ///
    /// Ranks compare the states of their generators: if one has drawn more often than another, all get an error.
    #[track_caller]
    pub fn random(
        distribution: Distribution,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        let layout = Layout::new(mesh.mesh(), shape, placements)?;
        random_at(distribution, &layout, dtype, mesh, mesh.generator(), Location::caller())
    }

    /// As [`random`](Self::random), drawn from another generator: one per rank, made inside the program. One that thread
    /// ranks share would be further along on some of them, which is an error.
    #[track_caller]
    pub fn random_from(
        generator: &Generator,
        distribution: Distribution,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        let layout = Layout::new(mesh.mesh(), shape, placements)?;
        random_at(distribution, &layout, dtype, mesh, generator, Location::caller())
    }

    /// One number everywhere, in a layout.
    #[track_caller]
    pub(crate) fn full_in(
        layout: &Layout,
        value: impl Into<Number>,
        dtype: DType,
        mesh: &DeviceMesh,
    ) -> Result<DTensor> {
        let value = value.into().fit(dtype)?;
        make(mesh, layout, dtype, Location::caller(), |meta, _| Ok(filled(value, meta)?))
    }

    /// Random elements in a layout, drawn from the generator of the mesh.
    #[track_caller]
    pub(crate) fn random_in(
        layout: &Layout,
        dtype: DType,
        mesh: &DeviceMesh,
        distribution: Distribution,
    ) -> Result<DTensor> {
        random_at(distribution, layout, dtype, mesh, mesh.generator(), Location::caller())
    }

    /// Uniform random numbers in `0..1`, f32.
    #[track_caller]
    pub fn rand(
        shape: impl Into<Shape>,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        Self::random(Distribution::Uniform { low: 0.0, high: 1.0 }, shape, DType::F32, mesh, placements)
    }

    /// Normal random numbers with mean 0 and standard deviation 1, f32.
    #[track_caller]
    pub fn randn(
        shape: impl Into<Shape>,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        Self::random(Distribution::Normal { mean: 0.0, std: 1.0 }, shape, DType::F32, mesh, placements)
    }

    /// Random integers in `low..high`, i64.
    #[track_caller]
    pub fn randint(
        low: i64,
        high: i64,
        shape: impl Into<Shape>,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        Self::random(Distribution::Integers { low, high }, shape, DType::I64, mesh, placements)
    }

    /// The numbers `0..n` in random order, i64.
    #[track_caller]
    pub fn randperm(n: usize, mesh: &DeviceMesh, placements: impl IntoIterator<Item = Placement>) -> Result<DTensor> {
        Self::random(Distribution::Permutation { n: n as u64 }, n, DType::I64, mesh, placements)
    }

    /// Zeros with the shape, type and layout of this tensor.
    #[track_caller]
    pub fn zeros_like(&self) -> Result<DTensor> {
        self.full_like(0.0)
    }

    /// Ones with the shape, type and layout of this tensor.
    #[track_caller]
    pub fn ones_like(&self) -> Result<DTensor> {
        self.full_like(1.0)
    }

    /// A tensor to be filled later with the shape, type and layout of this tensor.
    #[track_caller]
    pub fn empty_like(&self) -> Result<DTensor> {
        self.full_like(0.0)
    }

    /// One value with the shape, type and layout of this tensor; axes with a pending reduction become replicated.
    #[track_caller]
    pub fn full_like(&self, value: impl Into<Number>) -> Result<DTensor> {
        let layout = self.layout().settled();
        let value = value.into().fit(self.dtype())?;
        make(self.device_mesh(), &layout, self.dtype(), Location::caller(), |meta, _| Ok(filled(value, meta)?))
    }

    /// Random elements with the shape, type and layout of this tensor; axes with a pending reduction become replicated.
    #[track_caller]
    pub fn random_like(&self, distribution: Distribution) -> Result<DTensor> {
        let mesh = self.device_mesh();
        let layout = self.layout().settled();
        random_at(distribution, &layout, self.dtype(), mesh, mesh.generator(), Location::caller())
    }

    /// Uniform random numbers in `0..1` like this tensor.
    #[track_caller]
    pub fn rand_like(&self) -> Result<DTensor> {
        self.random_like(Distribution::Uniform { low: 0.0, high: 1.0 })
    }

    /// Normal random numbers like this tensor.
    #[track_caller]
    pub fn randn_like(&self) -> Result<DTensor> {
        self.random_like(Distribution::Normal { mean: 0.0, std: 1.0 })
    }

    /// Random integers in `low..high` like this tensor.
    #[track_caller]
    pub fn randint_like(&self, low: i64, high: i64) -> Result<DTensor> {
        self.random_like(Distribution::Integers { low, high })
    }
}

/// Longer ranges are a mistake.
const MAX_COUNT: f64 = 1e18;

/// How many numbers a range has; exact for integers.
fn range_count(start: Number, end: Number, step: Number) -> f64 {
    match (start, end, step) {
        (Number::Integer(start), Number::Integer(end), Number::Integer(step)) if step != 0 => {
            let (length, step) = (i128::from(end) - i128::from(start), i128::from(step));
            (length.div_euclid(step) + i128::from(length.rem_euclid(step) != 0 && step > 0)).max(0) as f64
        }
        _ => ((end.to_f64() - start.to_f64()) / step.to_f64()).ceil(),
    }
}

fn spaced(start: f64, end: f64, steps: usize, i: u64) -> f64 {
    match steps {
        0 | 1 => start,
        // From the nearer end, so that both ends are exact.
        _ if (i as usize) < steps / 2 => start + (end - start) / (steps - 1) as f64 * i as f64,
        _ => end - (end - start) / (steps - 1) as f64 * (steps - 1 - i as usize) as f64,
    }
}

/// A tensor whose part on this rank `fill` makes from its description; axes that shall be partial are made so after.
fn make(
    mesh: &DeviceMesh,
    layout: &Layout,
    dtype: DType,
    site: Site,
    fill: impl FnOnce(&TensorMeta, &Layout) -> Result<Tensor>,
) -> Result<DTensor> {
    check_dtype(dtype)?;
    check_partial(layout, dtype)?;
    foreign::check_computes(mesh)?;
    check_room(layout, dtype, mesh.world().is_dry())?;
    let settled = layout.settled();
    let rank = mesh.world().rank();
    let meta = TensorMeta { shape: settled.local_shape(rank), dtype };
    let local = match mesh.world().is_dry() || !mesh.contains(rank) {
        true => placeholder(&meta)?,
        false => fill(&meta, &settled)?,
    };
    DTensor::from_parts(mesh, settled, local).to_layout_at(layout, site)
}

/// Random elements; an error on every rank if the ranks' generators have drifted apart.
fn random_at(
    distribution: Distribution,
    layout: &Layout,
    dtype: DType,
    mesh: &DeviceMesh,
    generator: &Generator,
    site: Site,
) -> Result<DTensor> {
    // What cannot be made is refused before the generator moves on.
    check_dtype(dtype)?;
    check_room(layout, dtype, mesh.world().is_dry())?;
    let draw = agreed_draw(distribution, layout.shape(), dtype, mesh, generator, site)?;
    by_rule(mesh, layout, dtype, site, &random_rule(distribution, draw, dtype))
}

/// The next draw of a generator for a tensor of this shape; an error on every rank if the ranks' generators have drifted
/// apart, and one if the distribution makes no sense.
pub(crate) fn agreed_draw(
    distribution: Distribution,
    shape: &[usize],
    dtype: DType,
    mesh: &DeviceMesh,
    generator: &Generator,
    site: Site,
) -> Result<GeneratorState> {
    distribution.check()?;
    distribution.check_fit(shape, dtype)?;
    let draw = generator.draw();
    if mesh.contains(mesh.world().rank()) && mesh.size() > 1 {
        let values = [draw.seed, draw.offset].into_iter().collect();
        let agreed = mesh.whole_group()?.run(&Call::Agree { what: GENERATOR, values }, &[], site);
        agreed.map_err(said_of_generators)?;
    }
    Ok(draw)
}

/// What ranks compare before they draw.
const GENERATOR: &str = "generator seed and offset";

/// The error of ranks that do not draw alike, with the reason: other seeds, or other numbers of draws.
fn said_of_generators(error: Error) -> Error {
    let seed = |call: &RankCall| -> Option<String> {
        let values = call.call.strip_prefix("agree(")?.strip_prefix(GENERATOR)?.trim_start().strip_prefix('[')?;
        Some(values.split(',').next()?.to_string())
    };
    let Error::Mismatch { first, second, advice } = error else { return error };
    let advice = match (seed(&first), seed(&second)) {
        (Some(a), Some(b)) if a != b => "seeds differ: give manual_seed the same number on every rank of the mesh",
        (Some(_), Some(_)) => {
            "one rank has drawn more often: make the same random tensors in the same order on all ranks"
        }
        _ => advice,
    };
    Error::Mismatch { first, second, advice }
}

/// A box of the random tensor of a shape that a draw gives.
pub(crate) fn random_box(
    distribution: Distribution,
    draw: GeneratorState,
    shape: &[usize],
    part: &TensorBox,
    dtype: DType,
) -> Result<Tensor> {
    let run = |(&start, &size): (&usize, &usize)| Runs::range(start..start + size);
    let indices: Vec<Runs> = part.offsets.iter().zip(&part.sizes).map(run).collect();
    filled_by(shape, &indices, dtype, &random_rule(distribution, draw, dtype))
}

fn random_rule(distribution: Distribution, draw: GeneratorState, dtype: DType) -> impl Fn(u64, &[usize]) -> Number {
    let whole = matches!(distribution, Distribution::Integers { .. } | Distribution::Permutation { .. });
    let precision = mantissa_bits(dtype);
    move |i, _| match whole {
        true => Number::Integer(distribution.integer_at(draw, i)),
        false => Number::Real(distribution.at(draw, i, precision)),
    }
}

/// A tensor by a rule for its elements.
fn by_rule(mesh: &DeviceMesh, layout: &Layout, dtype: DType, site: Site, rule: Rule<'_>) -> Result<DTensor> {
    let rank = mesh.world().rank();
    make(mesh, layout, dtype, site, |_, layout| {
        let coordinate = layout.mesh().coordinate(rank).expect("ranks outside the mesh fill nothing");
        let indices: Vec<Runs> = (0..layout.shape().len()).map(|dim| layout.owned(dim, &coordinate)).collect();
        filled_by(layout.shape(), &indices, dtype, rule)
    })
}

/// The elements at all combinations of `indices` of a tensor of a shape, by a rule.
fn filled_by(shape: &[usize], indices: &[Runs], dtype: DType, rule: Rule<'_>) -> Result<Tensor> {
    let sizes: Vec<usize> = indices.iter().map(Runs::len).collect();
    let count = sizes.iter().product();
    let walk = |take: &mut dyn FnMut(Number)| {
        let mut index = vec![0; indices.len()];
        for_each_index(shape, indices, 0, 0, &mut index, &mut |flat, index| take(rule(flat, index)));
    };
    macro_rules! filled {
        ($convert:expr) => {{
            let mut values = reserve(count)?;
            let mut refused = Ok(());
            walk(&mut |value| match $convert(value) {
                Ok(element) => values.push(element),
                Err(error) => refused = Err(error),
            });
            refused?;
            Ok(Tensor::from_vec(values, sizes, &Device::Cpu)?.to_dtype(dtype)?)
        }};
    }
    match dtype {
        // Integers wrap; what a function gives otherwise must be a number of the type.
        DType::U8 | DType::U32 | DType::I16 | DType::I32 | DType::I64 => filled!(|value: Number| match value {
            Number::Integer(n) => Ok(n),
            Number::Real(_) => value.fit(dtype).map(Number::to_i64),
        }),
        DType::F64 => filled!(|value: Number| Ok::<_, Error>(value.to_f64())),
        _ => filled!(|value: Number| Ok::<_, Error>(value.to_f64() as f32)),
    }
}

/// Visits the elements at all combinations of `indices` in order, with their row-major number.
fn for_each_index(
    shape: &[usize],
    indices: &[Runs],
    dim: usize,
    flat: u64,
    index: &mut [usize],
    visit: &mut dyn FnMut(u64, &[usize]),
) {
    if dim == shape.len() {
        return visit(flat, index);
    }
    for i in indices[dim].iter().flatten() {
        index[dim] = i;
        for_each_index(shape, indices, dim + 1, flat * shape[dim] as u64 + i as u64, index, visit);
    }
}

//! Factories of distributed tensors: every rank fills in its local part of a tensor that a formula or a draw defines.

use std::ops::Range;
use std::panic::Location;

use candle_core::{DType, Device, Shape, Tensor};

use crate::comm::{Call, DeviceMesh};
use crate::error::{Error, RankCall, Result, Site};
use crate::layout::{Layout, Runs, TensorBox, TensorMeta};
use crate::placement::Placement;
use crate::random::{Distribution, Generator, GeneratorState, mantissa_bits};
use crate::tensor::{Arange, DTensor, Linspace, Logspace, check_memory, check_partial, create::device_registry};
use shardwise_kernels::{Number, check_dtype, convert, filled, placeholder, random_elements, reserve};

/// An element by its row-major number in the whole tensor and its index in every dimension.
type ElementRule<'a> = &'a dyn Fn(u64, &[usize]) -> Number;

/// What [`DTensor::random`] draws, and from which generator. A [`Distribution`] converts into one that draws from the
/// generator of the mesh.
#[derive(Debug, Clone, Copy)]
pub struct RandomOptions<'a> {
    /// The distribution of every element.
    pub distribution: Distribution,
    /// The generator to draw from; `None` is that of the mesh. Create it inside the program, one per rank with the same seed:
    /// one that thread ranks share would be further along on some of them, which is an error.
    pub generator: Option<&'a Generator>,
}

impl From<Distribution> for RandomOptions<'_> {
    fn from(distribution: Distribution) -> Self {
        RandomOptions { distribution, generator: None }
    }
}

/// # Factories
///
/// Every rank fills its own part. Nothing is communicated, except that random factories compare the generators of the ranks.
/// A rank outside the mesh holds nothing and may skip the call.
impl DTensor {
    /// Creates a tensor filled with one value.
    ///
    /// Local. As in PyTorch, a fraction is truncated for an integer type, and a negative integer wraps in an unsigned one.
    ///
    /// ```
    /// # use shardwise::prelude::*;
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let x = DTensor::full(7.0, (4, 2), DType::F32, &mesh, [Shard(0)])?;
    ///     assert_eq!(x.to_local()?.to_vec2::<f32>()?, [[7.0, 7.0], [7.0, 7.0]]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if the type does not hold the value (300 in u8, NaN in an integer type) or the placements do not fit
    /// the shape.
    #[track_caller]
    pub fn full(
        value: impl Into<Number>,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        let layout = Layout::new(mesh.mesh(), shape.into().into_dims(), placements)?;
        let value = value.into().fit(dtype)?; // on all ranks, also where nothing is filled
        build(mesh, &layout, dtype, Location::caller(), |meta, _| Ok(filled(value, meta)?))
    }

    /// Creates a tensor of zeros. Local.
    #[track_caller]
    pub fn zeros(
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        Self::full(0.0, shape, dtype, mesh, placements)
    }

    /// Creates a tensor of ones. Local.
    #[track_caller]
    pub fn ones(
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        Self::full(1.0, shape, dtype, mesh, placements)
    }

    /// Creates a tensor to be filled later. Unlike PyTorch's its elements are zero: uninitialized memory cannot be read here.
    /// Local.
    #[track_caller]
    pub fn empty(
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        Self::zeros(shape, dtype, mesh, placements)
    }

    /// Creates a tensor whose elements are a function of their index in the whole tensor. Local: `f` is called for the
    /// elements of this rank only.
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
        let layout = Layout::new(mesh.mesh(), shape.into().into_dims(), placements)?;
        by_rule(mesh, &layout, dtype, Location::caller(), &|_, index| Number::Real(f(index)))
    }

    /// Creates a vector of the numbers of a range: `0..12`, or [`Arange`] for a step other than 1.
    ///
    /// Local. Integers are exact in all of i64; for an integer type, fractions of start and step are truncated, and numbers
    /// that the type does not hold wrap, as in PyTorch.
    ///
    /// ```
    /// # use shardwise::prelude::*;
    /// # use shardwise::tensor::Arange;
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let x = DTensor::arange(0..4, DType::I64, &mesh, [Shard(0)])?;
    ///     assert_eq!(x.full_tensor()?.to_vec1::<i64>()?, [0, 1, 2, 3]);
    ///     let y = DTensor::arange(Arange::new(1.0, 0.0, -0.25), DType::F32, &mesh, [Shard(0)])?;
    ///     assert_eq!(y.full_tensor()?.to_vec1::<f32>()?, [1.0, 0.75, 0.5, 0.25]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if a bound is not finite or the step does not lead from start to end.
    #[track_caller]
    pub fn arange(
        range: impl Into<Arange>,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        let range = range.into();
        let layout = Layout::new(mesh.mesh(), range.count()?, placements)?;
        by_rule(mesh, &layout, dtype, Location::caller(), &|i, _| range.at(i, dtype.is_float()))
    }

    /// Creates a vector of numbers at equal distances, both ends included. Local.
    #[track_caller]
    pub fn linspace(
        space: Linspace,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        let layout = Layout::new(mesh.mesh(), space.steps, placements)?;
        // The ends of a sequence of integers are integers, as in PyTorch.
        let space = match dtype.is_float() {
            true => space,
            false => Linspace { start: space.start.trunc(), end: space.end.trunc(), ..space },
        };
        by_rule(mesh, &layout, dtype, Location::caller(), &|i, _| Number::Real(space.at(i)))
    }

    /// Creates a vector of powers of a base with exponents at equal distances, both ends included. Local.
    #[track_caller]
    pub fn logspace(
        space: Logspace,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        let layout = Layout::new(mesh.mesh(), space.steps, placements)?;
        // The exponents at the ends are integers if the powers are, as in PyTorch.
        let space = match dtype.is_float() {
            true => space,
            false => Logspace { start: space.start.trunc(), end: space.end.trunc(), ..space },
        };
        by_rule(mesh, &layout, dtype, Location::caller(), &|i, _| Number::Real(space.at(i)))
    }

    /// Creates a matrix of `(rows, columns)` with ones on its diagonal and zeros next to it. Local.
    #[track_caller]
    pub fn eye(
        shape: (usize, usize),
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        let layout = Layout::new(mesh.mesh(), shape, placements)?;
        let rule = |_: u64, index: &[usize]| Number::Integer(i64::from(index[0] == index[1]));
        by_rule(mesh, &layout, dtype, Location::caller(), &rule)
    }

    /// Creates a tensor of random elements, the same bits in every layout, mesh and world size.
    ///
    /// Collective: ranks compare the states of their generators, one small exchange. Takes a [`Distribution`], or
    /// [`RandomOptions`] to draw from a generator other than that of the mesh.
    ///
    /// ```
    /// # use shardwise::prelude::*;
    /// # use shardwise::Generator;
    /// # use shardwise::tensor::RandomOptions;
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let distribution = Distribution::Normal { mean: 0.0, std: 0.02 };
    ///     let x = DTensor::random(distribution, (4, 2), DType::F64, &mesh, [Shard(0)])?;
    ///     let generator = Generator::new(7);
    ///     let options = RandomOptions { distribution, generator: Some(&generator) };
    ///     let y = DTensor::random(options, (4, 2), DType::F64, &mesh, [Shard(1)])?;
    ///     assert!(!x.equal(&y)?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Mismatch`] on every rank if the generators differ: another seed, or more draws on one rank than on another.
    #[doc(alias = "random_from")]
    #[track_caller]
    pub fn random<'a>(
        options: impl Into<RandomOptions<'a>>,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        let RandomOptions { distribution, generator } = options.into();
        let layout = Layout::new(mesh.mesh(), shape.into().into_dims(), placements)?;
        let generator = generator.unwrap_or_else(|| mesh.generator());
        random_at(distribution, &layout, dtype, mesh, generator, Location::caller())
    }

    /// Creates a tensor of one value in a layout.
    #[track_caller]
    pub(crate) fn full_in(
        layout: &Layout,
        value: impl Into<Number>,
        dtype: DType,
        mesh: &DeviceMesh,
    ) -> Result<DTensor> {
        let value = value.into().fit(dtype)?;
        build(mesh, layout, dtype, Location::caller(), |meta, _| Ok(filled(value, meta)?))
    }

    /// Creates a tensor of random elements in a layout, drawn from the generator of the mesh.
    #[track_caller]
    pub(crate) fn random_in(
        layout: &Layout,
        dtype: DType,
        mesh: &DeviceMesh,
        distribution: Distribution,
    ) -> Result<DTensor> {
        random_at(distribution, layout, dtype, mesh, mesh.generator(), Location::caller())
    }

    /// Creates an f32 tensor of uniform random numbers in `0..1`. Collective, as [`random`](Self::random) is.
    #[track_caller]
    pub fn rand(
        shape: impl Into<Shape>,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        Self::random(Distribution::Uniform { low: 0.0, high: 1.0 }, shape, DType::F32, mesh, placements)
    }

    /// Creates an f32 tensor of normal random numbers with mean 0 and standard deviation 1. Collective, as
    /// [`random`](Self::random) is.
    #[track_caller]
    pub fn randn(
        shape: impl Into<Shape>,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        Self::random(Distribution::Normal { mean: 0.0, std: 1.0 }, shape, DType::F32, mesh, placements)
    }

    /// Creates an i64 tensor of random integers in a range, such as `0..10`. Collective, as [`random`](Self::random) is.
    #[track_caller]
    pub fn randint(
        range: Range<i64>,
        shape: impl Into<Shape>,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        let distribution = Distribution::Integers { low: range.start, high: range.end };
        Self::random(distribution, shape, DType::I64, mesh, placements)
    }

    /// Creates an i64 vector of the numbers `0..n` in random order. Collective, as [`random`](Self::random) is.
    #[track_caller]
    pub fn randperm(n: usize, mesh: &DeviceMesh, placements: impl IntoIterator<Item = Placement>) -> Result<DTensor> {
        Self::random(Distribution::Permutation { n: n as u64 }, n, DType::I64, mesh, placements)
    }

    /// Creates zeros with the shape, type and layout of this tensor; see [`full_like`](Self::full_like).
    #[track_caller]
    pub fn zeros_like(&self) -> Result<DTensor> {
        self.full_like(0.0)
    }

    /// Creates ones with the shape, type and layout of this tensor; see [`full_like`](Self::full_like).
    #[track_caller]
    pub fn ones_like(&self) -> Result<DTensor> {
        self.full_like(1.0)
    }

    /// Creates a tensor to be filled later with the shape, type and layout of this one. Its elements are zero.
    #[track_caller]
    pub fn empty_like(&self) -> Result<DTensor> {
        self.full_like(0.0)
    }

    /// Creates a tensor of one value with the shape, type and layout of this tensor. Local. Mesh axes on which this tensor is
    /// partial become replicated.
    #[track_caller]
    pub fn full_like(&self, value: impl Into<Number>) -> Result<DTensor> {
        let layout = self.layout().reduced();
        let value = value.into().fit(self.dtype())?;
        build(self.device_mesh(), &layout, self.dtype(), Location::caller(), |meta, _| Ok(filled(value, meta)?))
    }

    /// Creates a tensor of random elements with the shape, type and layout of this tensor, drawn from the generator of its mesh.
    /// Collective, as [`random`](Self::random) is. Mesh axes on which this tensor is partial become replicated.
    #[track_caller]
    pub fn random_like(&self, distribution: Distribution) -> Result<DTensor> {
        let mesh = self.device_mesh();
        let layout = self.layout().reduced();
        random_at(distribution, &layout, self.dtype(), mesh, mesh.generator(), Location::caller())
    }

    /// Creates uniform random numbers in `0..1`; see [`random_like`](Self::random_like).
    #[track_caller]
    pub fn rand_like(&self) -> Result<DTensor> {
        self.random_like(Distribution::Uniform { low: 0.0, high: 1.0 })
    }

    /// Creates normal random numbers with mean 0 and standard deviation 1; see [`random_like`](Self::random_like).
    #[track_caller]
    pub fn randn_like(&self) -> Result<DTensor> {
        self.random_like(Distribution::Normal { mean: 0.0, std: 1.0 })
    }

    /// Creates random integers in a range, such as `0..10`; see [`random_like`](Self::random_like).
    #[track_caller]
    pub fn randint_like(&self, range: Range<i64>) -> Result<DTensor> {
        self.random_like(Distribution::Integers { low: range.start, high: range.end })
    }
}

/// Builds a tensor whose local part `fill` returns for its shape and type. Partial axes are filled as replicated ones and
/// turned into partial ones afterwards.
fn build(
    mesh: &DeviceMesh,
    layout: &Layout,
    dtype: DType,
    site: Site,
    fill: impl FnOnce(&TensorMeta, &Layout) -> Result<Tensor>,
) -> Result<DTensor> {
    check_dtype(dtype)?;
    check_partial(layout, dtype)?;
    device_registry::check_computes(mesh)?;
    check_memory(layout, dtype, mesh.world().is_dry())?;
    let reduced = layout.reduced();
    let rank = mesh.world().rank();
    let meta = TensorMeta { shape: reduced.local_shape(rank), dtype };
    let local = match mesh.world().is_dry() || !mesh.contains(rank) {
        true => placeholder(&meta)?,
        false => fill(&meta, &reduced)?,
    };
    DTensor::from_parts(mesh, reduced, local).to_layout_at(layout, site)
}

/// Builds a tensor of random elements; an error on every rank if the ranks' generators differ.
fn random_at(
    distribution: Distribution,
    layout: &Layout,
    dtype: DType,
    mesh: &DeviceMesh,
    generator: &Generator,
    site: Site,
) -> Result<DTensor> {
    if dtype == DType::F8E4M3 {
        return random_at(distribution, layout, DType::F32, mesh, generator, site)?.to_dtype(dtype);
    }
    // A tensor that cannot be built is refused before the generator advances.
    check_dtype(dtype)?;
    check_memory(layout, dtype, mesh.world().is_dry())?;
    let draw = agreed_draw(distribution, layout.shape(), dtype, mesh, generator, site)?;
    let rank = mesh.world().rank();
    build(mesh, layout, dtype, site, |_, layout| {
        let coordinate = layout.mesh().coordinate(rank).expect("ranks outside the mesh fill nothing");
        let indices: Vec<Runs> = (0..layout.shape().len()).map(|dim| layout.owned(dim, &coordinate)).collect();
        random_at_indices(distribution, draw, layout.shape(), &indices, dtype)
    })
}

/// The elements of a random tensor of this shape at all combinations of `indices`.
fn random_at_indices(
    distribution: Distribution,
    draw: GeneratorState,
    shape: &[usize],
    indices: &[Runs],
    dtype: DType,
) -> Result<Tensor> {
    let Some(numbers) = distribution.in_vectors(dtype) else {
        return filled_by(shape, indices, dtype, &random_rule(distribution, draw, dtype));
    };
    let sizes: Vec<usize> = indices.iter().map(Runs::len).collect();
    let mut runs = Vec::new();
    if !sizes.contains(&0) {
        contiguous_runs(shape, indices, 0, &mut runs);
    }
    Ok(random_elements(draw.into(), numbers, runs, dtype)?.reshape(sizes)?)
}

/// Appends the elements at all combinations of `indices` as (row-major number of the first, length), in order.
fn contiguous_runs(shape: &[usize], indices: &[Runs], flat: u64, runs: &mut Vec<(u64, usize)>) {
    let [own, rest @ ..] = indices else {
        runs.push((flat, 1));
        return;
    };
    let inner = &shape[1..];
    let inner_count: usize = inner.iter().product();
    let at = |i: usize| flat + (i * inner_count) as u64;
    if rest.iter().zip(inner).all(|(runs, &size)| runs.len() == size) {
        runs.extend(own.iter().map(|range| (at(range.start), range.len() * inner_count)));
        return;
    }
    own.iter().flatten().for_each(|i| contiguous_runs(inner, rest, at(i), runs));
}

/// Takes the next draw of a generator for a tensor of this shape. Collective: an error on every rank if the ranks' generators
/// differ, or if the distribution is invalid for the shape or type.
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
        agreed.map_err(with_generator_advice)?;
    }
    Ok(draw)
}

/// What ranks compare before they draw.
const GENERATOR: &str = "generator seed and offset";

/// Adds the reason to the error of ranks whose generators differ: the seeds, or the number of draws.
fn with_generator_advice(error: Error) -> Error {
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

/// The elements of one box of the random tensor of a shape and draw.
pub(crate) fn random_box(
    distribution: Distribution,
    draw: GeneratorState,
    shape: &[usize],
    part: &TensorBox,
    dtype: DType,
) -> Result<Tensor> {
    let run = |(&start, &size): (&usize, &usize)| Runs::range(start..start + size);
    let indices: Vec<Runs> = part.offsets.iter().zip(&part.sizes).map(run).collect();
    random_at_indices(distribution, draw, shape, &indices, dtype)
}

fn random_rule(distribution: Distribution, draw: GeneratorState, dtype: DType) -> impl Fn(u64, &[usize]) -> Number {
    let is_integer = matches!(distribution, Distribution::Integers { .. } | Distribution::Permutation { .. });
    let precision = mantissa_bits(dtype);
    move |i, _| match is_integer {
        true => Number::Integer(distribution.integer_at(draw, i)),
        false => Number::Real(distribution.at(draw, i, precision)),
    }
}

/// Builds a tensor element by element.
fn by_rule(mesh: &DeviceMesh, layout: &Layout, dtype: DType, site: Site, rule: ElementRule<'_>) -> Result<DTensor> {
    let rank = mesh.world().rank();
    build(mesh, layout, dtype, site, |_, layout| {
        let coordinate = layout.mesh().coordinate(rank).expect("ranks outside the mesh fill nothing");
        let indices: Vec<Runs> = (0..layout.shape().len()).map(|dim| layout.owned(dim, &coordinate)).collect();
        filled_by(layout.shape(), &indices, dtype, rule)
    })
}

/// The elements at all combinations of `indices` (one list per dimension) of a tensor of this shape.
fn filled_by(shape: &[usize], indices: &[Runs], dtype: DType, rule: ElementRule<'_>) -> Result<Tensor> {
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
            Ok(convert(&Tensor::from_vec(values, sizes, &Device::Cpu)?, dtype)?)
        }};
    }
    match dtype {
        // Integers wrap, as in PyTorch; a floating-point result of a rule must be a number that the type holds.
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

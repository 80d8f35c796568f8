//! A random program under construction: its values, each with its unsharded counterpart, and the tolerance between the two.

use candle_core::{DType, Tensor};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use shardwise::prelude::*;
use shardwise_test_suites::values;

/// Tensors grow no larger than this.
pub(crate) const LARGEST: usize = 240;

/// Tensors with more dimensions are not used: candle's kernels end at 8, and some operators add a few.
const MOST_DIMS: usize = 5;

/// Values with a larger tolerance are compared, but not used any more: results computed from them would test nothing.
const TOO_VAGUE: f64 = 1e-4;

/// Larger values are scaled down before they are used.
const TOO_LARGE: f64 = 1000.0;

/// One value of a program.
pub(crate) struct Value {
    sharded: DTensor,
    plain: DTensor,
    /// All elements are integers, computed without rounding: equal to the last bit, whatever the layout.
    exact: bool,
    /// How far the two may differ.
    error: f64,
    /// The largest absolute value.
    peak: f64,
    /// The largest absolute value that a term of a partial tensor may have.
    span: f64,
    usable: bool,
}

impl Value {
    pub(crate) fn shape(&self) -> &[usize] {
        self.plain.shape()
    }

    pub(crate) fn rank(&self) -> usize {
        self.plain.ndim()
    }

    pub(crate) fn dtype(&self) -> DType {
        self.plain.dtype()
    }

    pub(crate) fn count(&self) -> usize {
        self.plain.elem_count()
    }

    pub(crate) fn is_exact(&self) -> bool {
        self.exact
    }

    pub(crate) fn is_float(&self) -> bool {
        self.dtype().is_float()
    }

    pub(crate) fn peak(&self) -> f64 {
        self.peak
    }

    pub(crate) fn span(&self) -> f64 {
        self.span
    }
}

/// What a leaf is filled with.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fill {
    /// Integers in f64.
    Whole,
    /// Eighths in f64.
    Eighths,
    /// Integers in f32.
    Single,
    /// Integers in i64.
    Int,
    /// Integers in `0..n`, in i64.
    Below(usize),
}

pub(crate) struct Program {
    /// Gradients are taken through the program: leaves are generic numbers, moved by so much.
    gradients: Option<f64>,
    /// Leaves that gradients are taken with respect to.
    leaves: Vec<usize>,
    rng: StdRng,
    mesh: DeviceMesh,
    alone: DeviceMesh,
    values: Vec<Value>,
    text: String,
    operators: usize,
}

impl Program {
    pub(crate) fn new(rng: StdRng, mesh: DeviceMesh, alone: DeviceMesh) -> Self {
        let (values, text) = (Vec::new(), String::new());
        Program { gradients: None, leaves: Vec::new(), rng, mesh, alone, values, text, operators: 0 }
    }

    /// A program through which gradients are taken. Its leaves are generic, so that nothing is on a kink or in a tie by
    /// construction; `moved` moves all of them a little.
    pub(crate) fn with_gradients(rng: StdRng, mesh: DeviceMesh, alone: DeviceMesh, moved: f64) -> Self {
        Program { gradients: Some(moved), ..Self::new(rng, mesh, alone) }
    }

    /// The gradients of a number that depends on the last values, with respect to every leaf: sharded and unsharded.
    pub(crate) fn gradients(&self) -> Result<Vec<(Tensor, Tensor)>> {
        let last: Vec<&Value> =
            self.values.iter().rev().filter(|v| v.usable && v.plain.has_gradient() && v.count() > 0).take(3).collect();
        let found = |side: fn(&Value) -> &DTensor| -> Result<Vec<Tensor>> {
            let mut loss: Option<DTensor> = None;
            for (i, value) in last.iter().enumerate() {
                let (tensor, shape) = (side(value), value.shape().to_vec());
                let whole = vec![Replicate; tensor.placements().len()];
                let weight = |at: &[usize]| {
                    let flat = at.iter().zip(&shape).fold(0, |flat, (i, n)| flat * n + i);
                    (values::hash(&[flat, i, 3]) % 33) as f64 / 16.0 - 1.0
                };
                let weights = DTensor::from_fn(tensor.shape(), tensor.dtype(), tensor.device_mesh(), whole, weight)?;
                let part = tensor.mul(&weights)?.sum_all()?.to_dtype(DType::F64)?;
                loss = Some(loss.map_or(Ok(part.clone()), |loss| loss.add(&part))?);
            }
            let Some(loss) = loss else { return Ok(Vec::new()) };
            let gradients = loss.backward()?;
            let of = |&leaf: &usize| match gradients.get(side(&self.values[leaf])) {
                Ok(gradient) => gradient.full_tensor(),
                Err(_) => Ok(self.values[leaf].plain.to_local()?.zeros_like()?),
            };
            self.leaves.iter().map(of).collect()
        };
        let (sharded, plain) = (found(|v| &v.sharded)?, found(|v| &v.plain)?);
        Ok(sharded.into_iter().zip(plain).collect())
    }

    pub(crate) fn rng(&mut self) -> &mut StdRng {
        &mut self.rng
    }

    /// Whether some ranks of the world are not in the mesh.
    pub(crate) fn has_ranks_outside(&self) -> bool {
        self.mesh.world().size() > self.mesh.mesh().size()
    }

    pub(crate) fn operators(&self) -> usize {
        self.operators
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn value(&self, number: usize) -> &Value {
        &self.values[number]
    }

    /// A number below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.rng.random_range(0..n)
    }

    pub(crate) fn chance(&mut self, p: f64) -> bool {
        self.rng.random_bool(p)
    }

    /// A dimension of a tensor with `ndim` of them, counted from the front or from the back.
    pub(crate) fn dim(&mut self, ndim: usize) -> isize {
        let dim = self.below(ndim) as isize;
        if self.chance(0.5) { dim } else { dim - ndim as isize }
    }

    /// Some dimensions, each at most once; possibly none, which means all.
    pub(crate) fn dims(&mut self, ndim: usize) -> Vec<isize> {
        let mut all: Vec<isize> = (0..ndim as isize).collect();
        all.shuffle(&mut self.rng);
        all.truncate(self.rng.random_range(0..=ndim));
        all
    }

    /// The sizes of a new tensor: uneven ones, 1, and now and then none.
    pub(crate) fn shape(&mut self, ndim: usize) -> Vec<usize> {
        loop {
            let sizes = [1, 2, 2, 3, 4, 4, 5, 6, 7, 8];
            let mut shape: Vec<usize> = (0..ndim).map(|_| *sizes.choose(&mut self.rng).expect("sizes")).collect();
            if ndim > 0 && self.chance(0.03) {
                let dim = self.below(ndim);
                shape[dim] = 0;
            }
            if shape.iter().product::<usize>() <= LARGEST / 2 {
                return shape;
            }
        }
    }

    /// The initial leaves of a program.
    pub(crate) fn leaves(&mut self) -> Result<()> {
        for _ in 0..self.rng.random_range(2..=4) {
            let ndim = *[0, 1, 2, 2, 2, 3, 3, 4].choose(&mut self.rng).expect("sizes");
            let shape = self.shape(ndim);
            let fill = [Fill::Whole, Fill::Eighths, Fill::Eighths, Fill::Int, Fill::Single];
            let fill = *fill.choose(&mut self.rng).expect("some");
            self.leaf(&shape, fill)?;
        }
        Ok(())
    }

    /// A value that can be used, preferably a late one.
    pub(crate) fn find(&mut self, wanted: impl Fn(&Value) -> bool) -> Option<usize> {
        let fits = |i: &usize| self.values[*i].usable && self.values[*i].count() <= LARGEST && wanted(&self.values[*i]);
        let all: Vec<usize> = (0..self.values.len()).filter(fits).collect();
        let late = if self.rng.random_bool(0.5) { all.len().saturating_sub(2) } else { 0 };
        all[late..].choose(&mut self.rng).copied()
    }

    /// A value that can be used, or a new leaf of this shape.
    pub(crate) fn find_or(
        &mut self,
        wanted: impl Fn(&Value) -> bool,
        shape: impl FnOnce(&mut Self) -> Vec<usize>,
    ) -> Result<usize> {
        let found = if self.chance(0.75) { self.find(wanted) } else { None };
        match found {
            Some(value) => Ok(value),
            None => {
                let shape = shape(self);
                let fill = *[Fill::Whole, Fill::Eighths].choose(&mut self.rng).expect("some");
                self.leaf(&shape, fill)
            }
        }
    }

    /// A new tensor in a random layout.
    pub(crate) fn leaf(&mut self, shape: &[usize], fill: Fill) -> Result<usize> {
        let seed = self.rng.random_range(0..1_000_000);
        let (dtype, factor, below) = match fill {
            Fill::Whole => (DType::F64, 1.0, None),
            Fill::Eighths => (DType::F64, 0.125, None),
            Fill::Single => (DType::F32, 1.0, None),
            Fill::Int => (DType::I64, 1.0, None),
            Fill::Below(n) => (DType::I64, 1.0, Some(n as u64)),
        };
        let moved = self.gradients;
        let value = move |flat: usize| match values::hash(&[seed, flat]) {
            h if below.is_some() => (h % below.expect("some").max(1)) as f64,
            h => {
                let coarse = factor * ((h % 33) as f64 - 16.0);
                let fine = |salt: usize| (values::hash(&[seed, flat, salt]) % 1_000_003) as f64 / 1_000_003.0;
                match moved {
                    Some(moved) if dtype == DType::F64 => 0.125 * coarse + 0.09 * fine(1) + moved * fine(2),
                    _ => coarse,
                }
            }
        };
        let made = |mesh: &DeviceMesh, layout: &Layout| {
            let local = values::local_of(layout, mesh.world().rank(), seed, &value).to_dtype(dtype)?;
            DTensor::from_local_with_shape(&local, mesh, layout.placements().to_vec(), shape)
        };
        let layout = self.layout(shape, dtype, false);
        let sharded = made(&self.mesh, &layout)?;
        let plain = made(&self.alone, &Layout::replicated(self.alone.mesh(), shape)?)?;
        self.text += &format!("  v{} = {fill:?} {layout}\n", self.values.len());
        let trained = self.gradients.is_some() && dtype == DType::F64;
        let exact = !matches!(fill, Fill::Eighths) && !trained;
        let (sharded, plain) =
            if trained { (sharded.requires_grad(), plain.requires_grad()) } else { (sharded, plain) };
        if trained {
            self.leaves.push(self.values.len());
        }
        // The terms of partial tensors have some noise.
        let span = 16.0 + if layout.is_partial() { 9.0 * self.mesh.mesh().size() as f64 } else { 0.0 };
        self.check(sharded, plain, exact, 0.0, span, 0.0)?;
        Ok(self.values.len() - 1)
    }

    /// A random layout; with `any_order`, mesh axes may shard a dimension in another order than that of the mesh.
    pub(crate) fn layout(&mut self, shape: &[usize], dtype: DType, any_order: bool) -> Layout {
        let (mesh, rng) = (self.mesh.mesh(), &mut self.rng);
        let mut placements = vec![Replicate; mesh.ndim()];
        for axis in 0..mesh.ndim() {
            let kind = rng.random_range(0..12);
            let dim = if shape.is_empty() { 0 } else { rng.random_range(0..shape.len()) };
            placements[axis] = match kind {
                0..=2 => Replicate,
                3..=4 => {
                    let served: Vec<ReduceOp> = ReduceOp::ALL.into_iter().filter(|op| op.supports(dtype)).collect();
                    Partial(*served.choose(rng).expect("a sum"))
                }
                _ if shape.is_empty() => Replicate,
                5..=9 => Shard(dim as isize),
                10 => values::ragged(mesh, shape, &placements, dim, axis, rng.random_range(0..99)),
                _ => Placement::StridedShard { dim: dim as isize, split_factor: rng.random_range(2..4) },
            };
        }
        let usual = Layout::new(mesh, shape, placements.clone()).expect("a layout");
        if !any_order {
            return usual;
        }
        let mut orders: Vec<(usize, Vec<&str>)> = Vec::new();
        for dim in 0..shape.len() {
            let axes = usual.shard_order(dim).iter().map(|&a| mesh.axes()[a].name.as_str());
            orders.push((dim, axes.collect()));
            orders[dim].1.shuffle(rng);
        }
        let order: Vec<(usize, &[&str])> = orders.iter().map(|(dim, axes)| (*dim, axes.as_slice())).collect();
        // Ragged sizes fit the order for which they were drawn.
        Layout::with_shard_order(mesh, shape, placements, &order).unwrap_or(usual)
    }

    /// Runs an operator sharded and unsharded, compares the results, and adds them as new values.
    ///
    /// `keeps` says that integers are not rounded on the way. `gain` bounds how much the operator magnifies an error
    /// of its operands, and its terms: what it adds up is no larger than `gain` times the operands.
    pub(crate) fn apply(
        &mut self,
        text: &str,
        operands: &[usize],
        keeps: bool,
        gain: f64,
        run: impl Fn(&[DTensor]) -> Result<Vec<DTensor>>,
    ) -> Result<Vec<usize>> {
        let first = self.values.len();
        let names: Vec<String> = operands.iter().map(|i| format!("v{i}")).collect();
        self.text += &format!("  v{first}.. = {text} of {}\n", names.join(", "));
        let of = |side: fn(&Value) -> &DTensor| {
            operands.iter().map(|&i| side(&self.values[i]).clone()).collect::<Vec<DTensor>>()
        };
        let plain = run(&of(|v| &v.plain))?;
        let sharded = run(&of(|v| &v.sharded))?;
        self.operators += 1;
        let exact = keeps && operands.iter().all(|&i| self.values[i].exact);
        let error = gain * operands.iter().map(|&i| self.values[i].error).sum::<f64>();
        let span = gain * operands.iter().map(|&i| self.values[i].span).fold(1.0, f64::max);
        let coarsest = operands.iter().map(|&i| precision(self.values[i].dtype())).fold(0.0, f64::max);
        assert_eq!(sharded.len(), plain.len(), "number of results");
        for (sharded, plain) in sharded.into_iter().zip(plain) {
            self.text += &format!("      v{} is {} {}\n", self.values.len(), plain.dtype().as_str(), sharded.layout());
            self.check(sharded, plain, exact, error, span, coarsest)?;
        }
        let made: Vec<usize> = (first..self.values.len()).collect();
        for &value in &made {
            self.tame(value)?;
        }
        Ok(made)
    }

    /// Scales large values down to where the next operators are well conditioned.
    fn tame(&mut self, value: usize) -> Result<()> {
        if self.values[value].span <= TOO_LARGE || !self.values[value].usable {
            return Ok(());
        }
        self.values[value].usable = false;
        let span = self.values[value].span;
        match (self.values[value].exact, self.chance(0.5)) {
            (true, _) => {
                let rest = |x: &[DTensor]| {
                    let whole = vec![Replicate; x[0].placements().len()];
                    let seven = DTensor::full(7.0, (), x[0].dtype(), x[0].device_mesh(), whole)?;
                    Ok(vec![x[0].remainder(&seven)?])
                };
                self.apply("remainder 7", &[value], true, 1.0, rest)?;
            }
            (false, true) => drop(self.apply("tanh", &[value], false, 1.0, |x| Ok(vec![x[0].tanh()?]))?),
            (false, false) => {
                let factor = (-(span / 8.0).log2().ceil()).exp2();
                let text = format!("mul_scalar {factor}");
                self.apply(&text, &[value], false, factor, move |x| Ok(vec![x[0].mul_scalar(factor)?]))?;
            }
        }
        Ok(())
    }

    /// Compares two sides of a new value, and keeps it.
    fn check(
        &mut self,
        sharded: DTensor,
        plain: DTensor,
        exact: bool,
        error: f64,
        terms: f64,
        coarsest: f64,
    ) -> Result<()> {
        let precision = coarsest.max(precision(plain.dtype()));
        let expected = numbers(&plain.to_local()?)?;
        let peak = expected.iter().filter(|x| x.is_finite()).fold(0.0, |peak: f64, x| peak.max(x.abs()));
        let terms = terms.max(peak).max(1.0);
        let span = if sharded.layout().is_partial() { terms } else { peak };
        // Integers with fewer digits are not rounded, nor are halves of them.
        let exact = (exact && terms * precision <= 0.5) || !plain.dtype().is_float();
        // An operator rounds a few times: each of its terms, and partial sums of them.
        let error = if exact { 0.0 } else { error + 8.0 * precision * terms };
        let got = sharded.full_tensor()?;
        if self.mesh.contains(self.mesh.world().rank()) {
            if (got.dims(), got.dtype()) != (plain.shape(), plain.dtype()) {
                let text =
                    format!("got {:?} {:?}, expected {:?} {:?}", got.dtype(), got.dims(), plain.dtype(), plain.shape());
                return Err(Error::other(text));
            }
            let got = numbers(&got)?;
            let close = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= error;
            if !got.iter().zip(&expected).all(close) {
                let worst = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                let text = format!(
                    "v{}: got {got:?},\nexpected {expected:?}\nwithin {error:e}, but the difference is {worst:e}",
                    self.values.len()
                );
                return Err(Error::other(text));
            }
        }
        let usable = error <= TOO_VAGUE && plain.ndim() <= MOST_DIMS && expected.iter().all(|x| x.is_finite());
        self.values.push(Value { sharded, plain, exact, error, peak, span, usable });
        Ok(())
    }
}

/// The machine epsilon of a type.
fn precision(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 => f64::from(f32::EPSILON),
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        _ => 0.0,
    }
}

/// The elements in row-major order.
fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    if tensor.elem_count() == 0 {
        return Ok(Vec::new());
    }
    Ok(tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?)
}

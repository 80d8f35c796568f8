//! [`Call`]: a collective as a value, with the checks of its arguments, its result shapes and its bytes.

use std::fmt;

use candle_core::{DType, Tensor};
use smallvec::SmallVec;

use crate::error::{ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::placement::ReduceOp;
use shardwise_kernels::check_stored;

/// One size per rank of a group.
pub type RankSizes = SmallVec<[usize; 8]>;

/// A collective with all its arguments except the tensors. Roots are ranks within the group.
///
/// Engines receive it in [`Communicator::run`](super::Communicator::run). All ranks of a group must make equal calls;
/// only [`Call::AllToAll`] may differ, in what each rank expects.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Call {
    /// Waits for all ranks.
    Barrier,
    /// Checks that every rank passes the same numbers.
    Agree {
        /// The name of the numbers in errors.
        what: &'static str,
        /// The numbers of this rank.
        values: SmallVec<[u64; 4]>,
    },
    /// Reduces inputs of one shape; every rank gets the result.
    AllReduce {
        /// The reduction.
        op: ReduceOp,
    },
    /// Reduces inputs of one shape; the root gets the result.
    Reduce {
        /// The reduction.
        op: ReduceOp,
        /// The rank that gets the result.
        root: usize,
    },
    /// Concatenates the inputs in rank order; every rank gets the result.
    AllGather {
        /// The dimension of the concatenation.
        dim: usize,
        /// Size of every rank's input along `dim`.
        sizes: RankSizes,
    },
    /// Concatenates the inputs in rank order; the root gets the result.
    Gather {
        /// The dimension of the concatenation.
        dim: usize,
        /// Size of every rank's input along `dim`.
        sizes: RankSizes,
        /// The rank that gets the result.
        root: usize,
    },
    /// Reduces inputs of one shape and splits the result; every rank gets its piece.
    ReduceScatter {
        /// The reduction.
        op: ReduceOp,
        /// The dimension that is split.
        dim: usize,
        /// Size of every rank's piece along `dim`.
        sizes: RankSizes,
    },
    /// Splits the root's input; every rank gets its piece.
    Scatter {
        /// Type and shape of the root's input.
        whole: TensorMeta,
        /// The dimension that is split.
        dim: usize,
        /// Size of every rank's piece along `dim`.
        sizes: RankSizes,
        /// The rank whose input is split.
        root: usize,
    },
    /// Copies the root's input to every rank.
    Broadcast {
        /// Type and shape of the root's input.
        whole: TensorMeta,
        /// The rank whose input is copied.
        root: usize,
    },
    /// Changes the dimension on which a tensor is sharded over the group.
    ExchangeDims {
        /// The dimension on which the inputs are sharded.
        from: usize,
        /// Size of every rank's input along `from`.
        from_sizes: RankSizes,
        /// The dimension on which the outputs are sharded.
        to: usize,
        /// Size of every rank's output along `to`.
        to_sizes: RankSizes,
    },
    /// Makes any number of inputs readable by every rank.
    Expose,
    /// Every rank sends one tensor to every rank.
    AllToAll {
        /// Type and shape of what this rank receives from every rank.
        expected: Vec<TensorMeta>,
    },
}

impl Call {
    /// The size of a result from which threads fill one shared output in two phases. Below it, the second
    /// rendezvous costs more than computing the result on every rank, or than copying the program's inputs.
    pub(crate) const SHARED_OUTPUT_MIN_BYTES: usize = 16 << 10;

    /// Whether thread ranks execute this call in two phases, so that no rank reads another's inputs after the call has
    /// returned. The same on all ranks of the call.
    pub(crate) fn has_second_phase(&self, inputs: &[Tensor]) -> bool {
        let bytes = |shape: &[usize], dtype: DType| TensorMeta { shape: shape.to_vec(), dtype }.bytes();
        let joined = |dim: usize, sizes: &RankSizes| {
            let mut shape = inputs.first()?.dims().to_vec();
            *shape.get_mut(dim)? = sizes.iter().fold(0, |sum, &n| sum.saturating_add(n));
            Some(bytes(&shape, inputs[0].dtype()))
        };
        let whole = match self {
            Call::AllReduce { .. } | Call::Reduce { .. } | Call::ReduceScatter { .. } => {
                inputs.first().map(|t| bytes(t.dims(), t.dtype()))
            }
            Call::AllGather { dim, sizes } | Call::Gather { dim, sizes, .. } => joined(*dim, sizes),
            Call::ExchangeDims { from, from_sizes, .. } => joined(*from, from_sizes),
            Call::Scatter { whole, .. } => Some(whole.bytes()),
            Call::Barrier | Call::Agree { .. } | Call::Broadcast { .. } | Call::AllToAll { .. } | Call::Expose => None,
        };
        whole.is_some_and(|bytes| bytes >= Self::SHARED_OUTPUT_MIN_BYTES)
    }

    /// Name of the collective, as in [`CommRecord::call`](super::CommRecord::call).
    pub fn name(&self) -> &'static str {
        match self {
            Call::Barrier => "barrier",
            Call::Agree { .. } => "agree",
            Call::AllReduce { .. } => "all_reduce",
            Call::Reduce { .. } => "reduce",
            Call::AllGather { .. } => "all_gather",
            Call::Gather { .. } => "gather",
            Call::ReduceScatter { .. } => "reduce_scatter",
            Call::Scatter { .. } => "scatter",
            Call::Broadcast { .. } => "broadcast",
            Call::ExchangeDims { .. } => "exchange_dims",
            Call::Expose => "expose",
            Call::AllToAll { .. } => "all_to_all",
        }
    }

    /// Checks the arguments of rank `me` in a group of `size` ranks, as far as one rank can. Local.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a wrong number of tensors, a root or dimension out of range, sizes
    /// that do not match the tensor, or an element type that the reduction does not support.
    pub fn check(&self, me: usize, size: usize, inputs: &[Tensor]) -> Result<()> {
        inputs.iter().try_for_each(check_stored)?;
        let count = |needed: usize| match inputs.len() {
            n if n == needed => Ok(()),
            n => Err(ErrorKind::Operands.error(
                "inputs",
                format!("{n} tensor(s)"),
                format!("{needed}"),
                "a root passes Some(tensor), every other rank None; all_to_all takes one tensor per rank",
            )),
        };
        match self {
            Call::Barrier | Call::Agree { .. } => count(0),
            Call::Expose => Ok(()),
            Call::AllReduce { op } => count(1).and_then(|()| Ok(op.check(inputs[0].dtype())?)),
            Call::Reduce { op, root } => {
                check_root(*root, size)?;
                count(1).and_then(|()| Ok(op.check(inputs[0].dtype())?))
            }
            Call::AllGather { dim, sizes } => {
                count(1)?;
                check_gather_sizes(inputs[0].dims(), *dim, sizes, me, size)
            }
            Call::Gather { dim, sizes, root } => {
                check_root(*root, size)?;
                count(1)?;
                check_gather_sizes(inputs[0].dims(), *dim, sizes, me, size)
            }
            Call::ReduceScatter { op, dim, sizes } => {
                count(1)?;
                op.check(inputs[0].dtype())?;
                check_split_sizes(inputs[0].dims(), *dim, sizes, size)
            }
            Call::Scatter { whole, dim, sizes, root } => {
                check_root(*root, size)?;
                count(usize::from(me == *root))?;
                check_split_sizes(&whole.shape, *dim, sizes, size)?;
                inputs.first().map_or(Ok(()), |t| check_meta(t, whole))
            }
            Call::Broadcast { whole, root } => {
                check_root(*root, size)?;
                count(usize::from(me == *root))?;
                inputs.first().map_or(Ok(()), |t| check_meta(t, whole))
            }
            Call::ExchangeDims { from, from_sizes, to, to_sizes } => {
                count(1)?;
                check_gather_sizes(inputs[0].dims(), *from, from_sizes, me, size)?;
                check_split_sizes(inputs[0].dims(), *to, to_sizes, size)?;
                check_different(*from, *to)
            }
            Call::AllToAll { expected } => {
                count(size)?;
                check_expected(expected.len(), size)?;
                check_meta(&inputs[me], &expected[me])
            }
        }
    }

    /// Types and shapes of the results on rank `me`, for arguments that [`check`](Self::check) accepts.
    pub fn outputs(&self, me: usize, inputs: &[Tensor]) -> Vec<TensorMeta> {
        let like = |change: &dyn Fn(&mut Vec<usize>)| {
            let mut shape = inputs[0].dims().to_vec();
            change(&mut shape);
            vec![TensorMeta { shape, dtype: inputs[0].dtype() }]
        };
        match self {
            Call::Barrier | Call::Agree { .. } | Call::Expose => Vec::new(),
            Call::Reduce { root, .. } | Call::Gather { root, .. } if *root != me => Vec::new(),
            Call::AllReduce { .. } | Call::Reduce { .. } => like(&|_| {}),
            Call::AllGather { dim, sizes } | Call::Gather { dim, sizes, .. } => {
                like(&|shape| shape[*dim] = sizes.iter().sum())
            }
            Call::ReduceScatter { dim, sizes, .. } => like(&|shape| shape[*dim] = sizes[me]),
            Call::Scatter { whole, dim, sizes, .. } => {
                let mut piece = whole.clone();
                piece.shape[*dim] = sizes[me];
                vec![piece]
            }
            Call::Broadcast { whole, .. } => vec![whole.clone()],
            Call::ExchangeDims { from, from_sizes, to, to_sizes } => like(&|shape| {
                shape[*from] = from_sizes.iter().sum();
                shape[*to] = to_sizes[me];
            }),
            Call::AllToAll { expected } => expected.clone(),
        }
    }

    /// Checks that an engine returned tensors of the right types and shapes to rank `me`.
    ///
    /// Engines may live in any crate, and unsafe kernels rely on shapes and types.
    pub fn check_outputs(&self, me: usize, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let like = |sizes: &[(usize, usize)]| match (inputs, outputs) {
            ([input, ..], [output]) => {
                let size =
                    |d: usize| sizes.iter().find(|(dim, _)| *dim == d).map_or(input.dims()[d], |(_, size)| *size);
                output.dtype() == input.dtype()
                    && output.rank() == input.rank()
                    && output.dims().iter().enumerate().all(|(d, n)| *n == size(d))
            }
            _ => false,
        };
        let is = |output: &Tensor, meta: &TensorMeta| output.dtype() == meta.dtype && output.dims() == meta.shape;
        let fits = match self {
            Call::Barrier | Call::Agree { .. } | Call::Expose => outputs.is_empty(),
            Call::Reduce { root, .. } | Call::Gather { root, .. } if *root != me => outputs.is_empty(),
            Call::AllReduce { .. } | Call::Reduce { .. } => like(&[]),
            Call::AllGather { dim, sizes } | Call::Gather { dim, sizes, .. } => like(&[(*dim, sizes.iter().sum())]),
            Call::ReduceScatter { dim, sizes, .. } => like(&[(*dim, sizes[me])]),
            Call::ExchangeDims { from, from_sizes, to, to_sizes } => {
                like(&[(*from, from_sizes.iter().sum()), (*to, to_sizes[me])])
            }
            Call::Broadcast { whole, .. } => matches!(outputs, [output] if is(output, whole)),
            Call::Scatter { whole, dim, sizes, .. } => {
                matches!(outputs, [output] if output.dtype() == whole.dtype && output.rank() == whole.shape.len()
                    && output.dims().iter().enumerate().all(|(d, n)| *n == if d == *dim { sizes[me] } else { whole.shape[d] }))
            }
            Call::AllToAll { expected } => {
                outputs.len() == expected.len() && outputs.iter().zip(expected).all(|(output, meta)| is(output, meta))
            }
        };
        outputs.iter().try_for_each(check_stored)?;
        if fits {
            return Ok(());
        }
        let describe = |t: &Tensor| describe_tensor(t.dtype().as_str(), t.dims());
        let found = outputs.iter().map(describe).collect::<Vec<_>>().join(", ");
        let needed = self.outputs(me, inputs).iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        Err(ErrorKind::Operands.error(
            "result of the communication engine",
            format!("[{found}] from {}", self.describe(inputs)),
            format!("[{needed}]"),
            "correct the Communicator of this world",
        ))
    }

    /// Bytes that rank `me` of a group of `size` ranks sends with an algorithm that sends as few bytes as possible.
    pub fn bytes_sent(&self, me: usize, size: usize, inputs: &[Tensor]) -> usize {
        let bytes = |t: &Tensor| t.elem_count() * t.dtype().size_in_bytes();
        let input = || inputs.first().map_or(0, bytes);
        match self {
            Call::Barrier | Call::Agree { .. } | Call::Expose => 0,
            Call::AllReduce { .. } => 2 * input() * (size - 1) / size,
            Call::AllGather { .. } => input() * (size - 1),
            Call::Gather { root, .. } | Call::Reduce { root, .. } => {
                if me == *root {
                    0
                } else {
                    input()
                }
            }
            Call::Broadcast { root, .. } => {
                if me == *root && size > 1 {
                    input()
                } else {
                    0
                }
            }
            Call::ReduceScatter { sizes, dim, .. } | Call::Scatter { sizes, dim, .. } => {
                // everything except this rank's piece
                inputs.first().map_or(0, |t| match t.dims()[*dim] {
                    0 => 0,
                    extent => bytes(t) / extent * (extent - sizes[me]),
                })
            }
            Call::ExchangeDims { to, to_sizes, .. } => match inputs[0].dims()[*to] {
                0 => 0,
                extent => input() / extent * (extent - to_sizes[me]),
            },
            Call::AllToAll { .. } => inputs.iter().enumerate().filter(|(to, _)| *to != me).map(|(_, t)| bytes(t)).sum(),
        }
    }

    /// The call and its tensors as text, such as `all_reduce(sum) of f32 [4, 8]`.
    pub fn describe(&self, inputs: &[Tensor]) -> String {
        let mut text = self.to_string();
        for (i, t) in inputs.iter().enumerate() {
            text += if i == 0 { " of " } else { ", " };
            text += &describe_tensor(t.dtype().as_str(), t.dims());
        }
        text
    }
}

fn describe_tensor(dtype: &str, shape: &[usize]) -> String {
    format!("{dtype} {shape:?}")
}

fn check_different(from: usize, to: usize) -> Result<()> {
    if from != to {
        return Ok(());
    }
    Err(ErrorKind::Argument.error(
        "dimensions",
        format!("{from} twice"),
        "two different dimensions",
        "use all_to_all to exchange parts of one dimension",
    ))
}

fn check_expected(count: usize, size: usize) -> Result<()> {
    if count == size {
        return Ok(());
    }
    let needed = format!("{size}, one per rank of the group");
    Err(ErrorKind::Operands.error("expected tensors", count, needed, "describe what each rank sends"))
}

fn check_root(root: usize, size: usize) -> Result<()> {
    if root < size {
        return Ok(());
    }
    Err(ErrorKind::Rank { rank: root, size }.error(
        "root",
        root,
        format!("a rank of the group, below {size}"),
        "roots count within the group",
    ))
}

fn check_dim(shape: &[usize], dim: usize) -> Result<()> {
    if dim < shape.len() {
        return Ok(());
    }
    Err(ErrorKind::Dimension { dim: dim as isize, ndim: shape.len() }.error(
        "dimension",
        format!("{dim} for shape {shape:?}"),
        format!("one below {}", shape.len()),
        "name a dimension of the tensor",
    ))
}

fn check_count(sizes: &[usize], size: usize) -> Result<()> {
    if sizes.len() == size {
        return Ok(());
    }
    Err(ErrorKind::Argument.error(
        "sizes",
        format!("{sizes:?}"),
        format!("{size}, one per rank of the group"),
        "list one size per rank",
    ))
}

/// `sizes` lists the size of every rank's tensor along `dim`: one per rank, the right one for this rank.
fn check_gather_sizes(shape: &[usize], dim: usize, sizes: &[usize], me: usize, size: usize) -> Result<()> {
    check_dim(shape, dim)?;
    check_count(sizes, size)?;
    let joined = sizes.iter().try_fold(0usize, |sum, &s| sum.checked_add(s));
    let mut rest = shape.iter().enumerate().filter(|(d, _)| *d != dim).map(|(_, &n)| n);
    let elements = joined.and_then(|joined| rest.try_fold(joined, |count, n| count.checked_mul(n)));
    if elements.is_none_or(|count| count > isize::MAX as usize / 8) {
        return Err(ErrorKind::shape(shape).error(
            "sizes",
            format!("{sizes:?} along dimension {dim} of {shape:?}"),
            "a result that memory can address",
            "check the sizes for overflow",
        ));
    }
    if shape[dim] == sizes[me] {
        return Ok(());
    }
    Err(ErrorKind::shape(shape).error(
        "sizes",
        format!("{sizes:?}, which give {} to this rank, for a tensor of shape {shape:?}", sizes[me]),
        format!("{} at position {me}", shape[dim]),
        format!("list the size of every rank's tensor along dimension {dim}"),
    ))
}

/// `sizes` splits `dim` into one piece per rank.
fn check_split_sizes(shape: &[usize], dim: usize, sizes: &[usize], size: usize) -> Result<()> {
    check_dim(shape, dim)?;
    check_count(sizes, size)?;
    if sizes.iter().try_fold(0usize, |sum, &s| sum.checked_add(s)) == Some(shape[dim]) {
        return Ok(());
    }
    Err(ErrorKind::shape(shape).error(
        "sizes",
        format!("{sizes:?}"),
        format!("sizes that add up to {}, dimension {dim} of {shape:?}", shape[dim]),
        "correct the sizes",
    ))
}

fn check_meta(tensor: &Tensor, meta: &TensorMeta) -> Result<()> {
    if tensor.dtype() == meta.dtype && tensor.dims() == meta.shape {
        return Ok(());
    }
    Err(ErrorKind::shape(tensor.dims()).error(
        "tensor",
        describe_tensor(tensor.dtype().as_str(), tensor.dims()),
        meta,
        "pass the shape and type that the tensor has",
    ))
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name();
        match self {
            Call::Barrier | Call::Expose => f.write_str(name),
            Call::Agree { what, values } => write!(f, "{name}({what} {values:?})"),
            Call::AllReduce { op } => write!(f, "{name}({op})"),
            Call::Reduce { op, root } => write!(f, "{name}({op}, root {root})"),
            Call::AllGather { dim, sizes } => write!(f, "{name}(dim {dim}, sizes {sizes:?})"),
            Call::Gather { dim, sizes, root } => write!(f, "{name}(dim {dim}, sizes {sizes:?}, root {root})"),
            Call::ReduceScatter { op, dim, sizes } => write!(f, "{name}({op}, dim {dim}, sizes {sizes:?})"),
            Call::Scatter { whole, dim, sizes, root } => {
                write!(f, "{name}({whole}, dim {dim}, sizes {sizes:?}, root {root})")
            }
            Call::Broadcast { whole, root } => write!(f, "{name}({whole}, root {root})"),
            Call::ExchangeDims { from, from_sizes, to, to_sizes } => {
                write!(f, "{name}(dim {from} of sizes {from_sizes:?} to dim {to} of sizes {to_sizes:?})")
            }
            Call::AllToAll { expected } => {
                let expected: Vec<String> = expected.iter().map(ToString::to_string).collect();
                write!(f, "{name}(expecting {})", expected.join(", "))
            }
        }
    }
}

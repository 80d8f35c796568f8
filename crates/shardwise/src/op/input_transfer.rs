//! How a rank obtains what an operator requires of an input: redistributed, narrowed, or in an exchange of boxes.

use candle_core::Tensor;

use crate::comm::{DeviceMesh, with_call_origin};
use crate::error::{ErrorKind, Result, Site};
use crate::layout::{Layout, OwnedBox, TensorBox, TensorMeta};
use crate::redistribute::BoxExchange;
use crate::rule::RequiredInput;
use crate::tensor::DTensor;
use shardwise_kernels::placeholder;

/// How a rank obtains what an operator requires of an input.
pub(super) enum InputTransfer {
    /// The input is in the required layout already.
    Ready,
    Redistribute(Layout),
    /// After a redistribution every rank holds its box already and narrows its local tensor to it.
    Narrow {
        from: Layout,
        ranges: Vec<(usize, usize)>,
        after: TensorMeta,
    },
    /// After a redistribution ranks exchange boxes.
    Fetch {
        from: Layout,
        exchange: Box<BoxExchange>,
        after: TensorMeta,
    },
}

impl InputTransfer {
    pub(super) fn new(mesh: &DeviceMesh, input: &DTensor, need: &RequiredInput) -> Result<Self> {
        let (from, axes, boxes) = match need {
            RequiredInput::Layout(layout) if layout == input.layout() => return Ok(InputTransfer::Ready),
            RequiredInput::Layout(layout) => return Ok(InputTransfer::Redistribute(layout.clone())),
            RequiredInput::Boxes { from, .. } if !mesh.contains(mesh.world().rank()) => {
                return Ok(InputTransfer::Redistribute(from.clone()));
            }
            RequiredInput::Boxes { from, axes, boxes } => (from.clone(), axes, boxes),
        };
        let inside = |b: &TensorBox| {
            let mut ends = b.offsets.iter().zip(&b.sizes).zip(from.shape());
            let dims = from.shape().len();
            b.offsets.len() == dims
                && b.sizes.len() == dims
                && ends.all(|((o, s), n)| o.checked_add(*s).is_some_and(|end| end <= *n))
        };
        if boxes.len() != mesh.mesh().size() || !boxes.iter().all(inside) {
            let needed = format!("a box of {from} for each of {} ranks", mesh.mesh().size());
            let found = format!("boxes {boxes:?}");
            return Err(ErrorKind::Layout.error(
                "rule",
                found,
                needed,
                "request a box inside of the input for every rank",
            ));
        }
        let ranks = mesh.mesh().ranks();
        let position = |rank: usize| ranks.iter().position(|&r| r == rank).expect("a rank of the mesh");
        let wanted = |rank: usize| {
            let global = boxes[position(rank)].clone();
            let local_offsets = vec![0; global.offsets.len()];
            let some = global.volume() > 0;
            some.then_some(OwnedBox { rank, global, local_offsets }).into_iter().collect::<Vec<_>>()
        };
        let me = mesh.world().rank();
        let after = TensorMeta { shape: boxes[position(me)].sizes.clone(), dtype: input.dtype() };
        // Every rank of the group must come to the same answer, because either all of them exchange or none.
        let held = |rank: usize| {
            let own = from.boxes_of(rank);
            own.len() <= 1
                && wanted(rank)
                    .iter()
                    .all(|w| own.iter().any(|o| o.global.intersect(&w.global).as_ref() == Some(&w.global)))
        };
        if mesh.mesh().group_ranks(axes, me).into_iter().all(held) {
            let ranges = match (wanted(me).first(), from.boxes_of(me).first()) {
                (Some(w), Some(own)) => {
                    let starts = w.global.offsets.iter().zip(&own.global.offsets).map(|(w, o)| w - o);
                    starts.zip(w.global.sizes.iter().copied()).collect()
                }
                _ => after.shape.iter().map(|&n| (0, n)).collect(),
            };
            return Ok(InputTransfer::Narrow { from, ranges, after });
        }
        let exchange = BoxExchange::new(mesh.group_of(axes)?, input.dtype(), |r| from.boxes_of(r), wanted);
        Ok(InputTransfer::Fetch { from, exchange: Box::new(exchange), after })
    }

    /// The layout that the input is redistributed to, if it is not ready.
    pub(super) fn layout(&self) -> Option<&Layout> {
        match self {
            InputTransfer::Ready => None,
            InputTransfer::Redistribute(to) => Some(to),
            InputTransfer::Narrow { from, .. } | InputTransfer::Fetch { from, .. } => Some(from),
        }
    }

    pub(super) fn run(&self, input: &DTensor, dry: bool, site: Site) -> Result<Tensor> {
        match self {
            InputTransfer::Ready => Ok(input.storage().clone()),
            InputTransfer::Redistribute(layout) => Ok(input.to_layout_at(layout, site)?.storage().clone()),
            InputTransfer::Narrow { from, ranges, after } => {
                let source = input.to_layout_at(from, site)?;
                if dry || after.elem_count() == 0 {
                    return Ok(placeholder(&TensorMeta::new(after.shape.as_slice(), source.storage().dtype()))?);
                }
                let narrow = |t: Tensor, (dim, &(start, len)): (usize, &(usize, usize))| t.narrow(dim, start, len);
                Ok(ranges.iter().enumerate().try_fold(source.storage().clone(), narrow)?)
            }
            InputTransfer::Fetch { from, exchange, after } => {
                let source = input.to_layout_at(from, site)?;
                let terms = source.storage();
                with_call_origin(input.origin(), 0, || {
                    if terms.dtype() == after.dtype {
                        return exchange.assemble(terms, after, site);
                    }
                    // Terms of a partial sum along other axes move in the wider type in which they are stored.
                    let after = TensorMeta::new(after.shape.as_slice(), terms.dtype());
                    exchange.of_type(terms.dtype()).assemble(terms, &after, site)
                })
            }
        }
    }
}

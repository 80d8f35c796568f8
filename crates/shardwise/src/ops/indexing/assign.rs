//! Assignment to a range of a distributed tensor. The value behind the variable is replaced; clones keep the old one.

use std::ops::Range;
use std::panic::Location;

use crate::comm::record_implicit_operator;
use crate::error::{ErrorKind, Result, Site};
use crate::layout::{OwnedBox, TensorBox, TensorMeta};
use crate::placement::{Placement, is_linear};
use crate::redistribute::BoxExchange;
use crate::tensor::{Backward, DTensor, Number, SaveForBackward, SavedTensors, is_recording};
use shardwise_kernels::{Assembly, filled, placeholder};

const ZERO: Number = Number::Integer(0);

impl DTensor {
    /// Writes `value` to the elements in `ranges`, one range per dimension. Clones keep the old elements.
    ///
    /// Collective: every rank of the mesh must call it. Communicates only the parts of `value` that are needed on another
    /// rank; partial sums of this tensor are reduced first. Differentiable: the gradient of the elements that were
    /// overwritten goes to `value`, that of the other elements to the old value of this tensor.
    ///
    /// ```
    /// # use shardwise::prelude::*;
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let mut x = DTensor::zeros(6, DType::F32, &mesh, [Shard(0)])?;
    ///     x.assign(&[2..5], &DTensor::ones(3, DType::F32, &mesh, [Replicate])?)?;
    ///     assert_eq!(x.full_tensor()?.to_vec1::<f32>()?, [0.0, 0.0, 1.0, 1.0, 1.0, 0.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if a range exceeds its dimension, or `value` has another shape than the ranges,
    /// another type or another mesh.
    #[doc(alias = "slice_assign")]
    #[doc(alias = "__setitem__")]
    #[track_caller]
    pub fn assign(&mut self, ranges: &[Range<usize>], value: &DTensor) -> Result<()> {
        let site = Location::caller();
        let region = self.region(ranges)?;
        if value.shape() != region.sizes || value.dtype() != self.dtype() || value.device_mesh() != self.device_mesh() {
            return Err(ErrorKind::shape(value.shape()).error(
                "value to assign",
                format!("{} {}", value.dtype().as_str(), value.layout()),
                format!("{} {:?} on mesh {}", self.dtype().as_str(), region.sizes, self.layout().mesh()),
                "slice, convert or move the value first",
            ));
        }
        *self = record_implicit_operator("assign", || -> Result<DTensor> {
            if region.sizes == self.shape() {
                // All elements are overwritten: nothing depends on the old value.
                let moved = value.to_layout_at(&self.layout().reduced(), site)?;
                return Ok(if is_recording() { moved } else { moved.detach() });
            }
            let (value, base) = (value.reduced(site)?, self.reduced(site)?);
            let output = base.written(&region, Some(&value), ZERO, site)?;
            let backward = || Box::new(AssignBackward { name: "assign", region }) as Box<dyn Backward>;
            Ok(Self::recorded(vec![output], &[&base, &value], SaveForBackward::Nothing, backward).swap_remove(0))
        })?;
        Ok(())
    }

    /// Writes one number to the elements in `ranges`, one range per dimension.
    ///
    /// Local, unless this tensor is partial: then it is reduced first, which is collective. Differentiable: the gradient of the
    /// elements that were overwritten is zero.
    #[track_caller]
    pub fn fill_range(&mut self, ranges: &[Range<usize>], value: impl Into<Number>) -> Result<()> {
        let site = Location::caller();
        let region = self.region(ranges)?;
        let value = value.into().fit(self.dtype())?; // refused by all ranks, also by ranks that hold nothing of the region
        *self = record_implicit_operator("fill_range", || -> Result<DTensor> {
            let base = self.reduced(site)?;
            let output = base.written(&region, None, value, site)?;
            let backward = || Box::new(AssignBackward { name: "fill_range", region }) as Box<dyn Backward>;
            Ok(Self::recorded(vec![output], &[&base], SaveForBackward::Nothing, backward).swap_remove(0))
        })?;
        Ok(())
    }

    /// Writes one number to all elements. Local. Partial axes become replicated, and the result has no gradient.
    #[doc(alias = "fill_")]
    #[track_caller]
    pub fn fill(&mut self, value: impl Into<Number>) -> Result<()> {
        *self = self.full_like(value)?;
        Ok(())
    }

    /// Copies the elements of another tensor of the same shape, type and mesh into the layout of this one. Collective, as
    /// [`assign`](Self::assign) is. Differentiable.
    #[doc(alias = "copy_")]
    #[track_caller]
    pub fn copy_from(&mut self, other: &DTensor) -> Result<()> {
        let all: Vec<Range<usize>> = self.shape().iter().map(|&n| 0..n).collect();
        self.assign(&all, other)
    }

    fn region(&self, ranges: &[Range<usize>]) -> Result<TensorBox> {
        let fits = ranges.len() == self.ndim()
            && ranges.iter().zip(self.shape()).all(|(r, &n)| r.start <= r.end && r.end <= n);
        if !fits {
            return Err(ErrorKind::Argument.error(
                "ranges",
                format!("{ranges:?}"),
                format!("one range within each dimension of {:?}", self.shape()),
                "use 0..n for a whole dimension",
            ));
        }
        Ok(TensorBox {
            offsets: ranges.iter().map(|r| r.start).collect(),
            sizes: ranges.iter().map(ExactSizeIterator::len).collect(),
        })
    }

    /// This tensor with a region overwritten by a tensor, or by a number if there is none. Not recorded.
    ///
    /// No axis may be partial, with one exception: zero can be written to a partial sum, because zeros on all ranks sum to zero.
    fn written(&self, region: &TensorBox, value: Option<&DTensor>, number: Number, site: Site) -> Result<DTensor> {
        let (mesh, me) = (self.device_mesh(), self.device_mesh().world().rank());
        if !mesh.contains(me) || (mesh.world().is_dry() && value.is_none()) {
            return Ok(self.detach());
        }
        // The overwritten parts of a rank's boxes, with their offsets in its local tensor.
        let overwritten = |rank: usize| -> Vec<OwnedBox> {
            let owned = self.layout().boxes_of(rank).into_iter();
            let parts = owned.filter_map(|owned| {
                let part = owned.global.intersect(region)?;
                let inside = part.offsets.iter().zip(&owned.global.offsets).zip(&owned.local_offsets);
                let local_offsets = inside.map(|((part, start), local)| part - start + local).collect();
                Some(OwnedBox { rank, global: part, local_offsets })
            });
            parts.collect()
        };
        let blocks = match value {
            Some(value) => {
                // The boxes of the value, with offsets that count in this tensor.
                let shifted = |rank: usize| -> Vec<OwnedBox> {
                    let mut boxes = value.layout().boxes_of(rank);
                    for owned in &mut boxes {
                        owned.global.offsets.iter_mut().zip(&region.offsets).for_each(|(o, start)| *o += start);
                    }
                    boxes
                };
                let group = mesh.whole_group()?;
                BoxExchange::new(group, self.dtype(), shifted, overwritten).run(value.local(), site)?
            }
            None => {
                let block = |owned: OwnedBox| -> Result<_> {
                    let meta = TensorMeta { shape: owned.global.sizes, dtype: self.dtype() };
                    Ok((owned.local_offsets, filled(number, &meta)?))
                };
                overwritten(me).into_iter().map(block).collect::<Result<Vec<_>>>()?
            }
        };
        let meta = TensorMeta::new(self.local().dims(), self.dtype());
        if mesh.world().is_dry() {
            return Ok(Self::from_parts(mesh, self.layout().clone(), placeholder(&meta)?));
        }
        let local = Assembly::new(meta)?;
        // SAFETY: one thread; every block is inside the local tensor, which is written as a whole first.
        let local = unsafe {
            local.paste(self.local(), &vec![0; self.ndim()]);
            blocks.iter().for_each(|(offsets, block)| local.paste(block, offsets));
            local.finish()
        };
        Ok(Self::from_parts(mesh, self.layout().clone(), local))
    }
}

/// The backward pass of an assignment: the gradient of the region goes to the value, that of the rest to the old tensor.
struct AssignBackward {
    name: &'static str,
    region: TensorBox,
}

impl Backward for AssignBackward {
    fn name(&self) -> &'static str {
        self.name
    }

    fn run(&self, saved: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
        let base = || -> Result<DTensor> {
            let linear = |p: &Placement| p.reduction().is_none_or(is_linear);
            let gradient = match gradient.placements().iter().all(linear) {
                true => gradient.clone(),
                false => gradient.reduced(Location::caller())?,
            };
            let output = gradient.written(&self.region, None, ZERO, Location::caller())?;
            let backward =
                || Box::new(AssignBackward { name: self.name, region: self.region.clone() }) as Box<dyn Backward>;
            Ok(DTensor::recorded(vec![output], &[&gradient], SaveForBackward::Nothing, backward).swap_remove(0))
        };
        let value = || {
            let ranges = self.region.offsets.iter().zip(&self.region.sizes).enumerate();
            ranges.into_iter().try_fold(gradient.clone(), |g, (dim, (&start, &len))| g.narrow(dim as isize, start, len))
        };
        let mut found = vec![saved.needs_input_grad(0).then(base).transpose()?];
        if saved.num_inputs() > 1 {
            found.push(saved.needs_input_grad(1).then(value).transpose()?);
        }
        Ok(found)
    }
}

//! Reading values of the whole tensor: `item`, `equal`, `allclose`.

use std::panic::Location;

use candle_core::{Device, Tensor, WithDType};

use crate::comm::{Call, record_implicit_operator, with_call_origin};
use crate::error::{ErrorKind, Result, Site};
use crate::layout::Layout;
use crate::placement::ReduceOp;
use crate::tensor::{DTensor, hash_of};
use shardwise_kernels::{all_close, all_equal};

impl DTensor {
    /// Returns the value of a tensor with one element, on every rank of the mesh.
    ///
    /// Collective, unless the tensor is replicated. A partial tensor is reduced first.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if there is not exactly one element, `T` is not the type of the tensor, or there
    /// is no value: in a dry run, or on a rank outside the mesh.
    #[track_caller]
    pub fn item<T: WithDType>(&self) -> Result<T> {
        let site = Location::caller();
        self.check_readable("item")?;
        if self.elem_count() != 1 {
            return Err(ErrorKind::shape(self.shape()).error(
                "tensor for item",
                format!("shape {:?}", self.shape()),
                "a tensor with one element",
                "reduce it first, or use full_tensor",
            ));
        }
        if self.dtype() != T::DTYPE {
            return Err(ErrorKind::dtype(T::DTYPE).error(
                "type for item",
                T::DTYPE.as_str(),
                self.dtype().as_str(),
                "ask for the tensor's own type, or convert it first",
            ));
        }
        let replicated = Layout::replicated(self.layout().mesh(), self.shape())?;
        let whole = record_implicit_operator("item", || self.to_layout_at(&replicated, site))?;
        Ok(whole.local().flatten_all()?.to_vec1::<T>()?[0])
    }

    /// Whether two tensors on one mesh have the same shape, type and elements. The same answer on every rank of the mesh.
    ///
    /// Collective: every rank of the mesh must call it. `other` is redistributed to the layout of this tensor.
    ///
    /// # Errors
    /// [`ErrorKind::NoData`] in a dry run, and on a rank outside the mesh if shapes and types are equal: the answer is in elements
    /// that such a rank does not have. PyTorch asks the ranks of the mesh for it, so that all ranks of the world have to call.
    #[doc(alias = "torch.equal")]
    #[track_caller]
    pub fn equal(&self, other: &DTensor) -> Result<bool> {
        if self.dtype() != other.dtype() {
            return Ok(false);
        }
        self.all_elements("equal", other, Location::caller(), |a, b| Ok(all_equal(a, b)?))
    }

    /// Whether two tensors on one mesh have the same shape and `|a - b| <= atol + rtol * |b|` for all elements. The same answer
    /// on every rank of the mesh. Collective, as [`equal`](Self::equal) is, and with its errors.
    #[track_caller]
    pub fn allclose(&self, other: &DTensor, rtol: f64, atol: f64) -> Result<bool> {
        self.all_elements("allclose", other, Location::caller(), |a, b| Ok(all_close(a, b, rtol, atol)?))
    }

    /// Whether `test` holds on all ranks for the local parts of both tensors in the same layout.
    fn all_elements(
        &self,
        name: &'static str,
        other: &DTensor,
        site: Site,
        test: impl FnOnce(&Tensor, &Tensor) -> Result<bool>,
    ) -> Result<bool> {
        let world = self.device_mesh().world();
        if world.is_dry() {
            self.check_readable(name)?;
        }
        if self.shape() != other.shape() {
            return Ok(false);
        }
        self.check_readable(name)?;
        record_implicit_operator(name, || {
            let a = self.reduced(site)?;
            let b = other.to_layout_at(a.layout(), site)?;
            let passed = test(a.local(), b.local())?;
            let mine = Tensor::new(&[u8::from(passed)], &Device::Cpu)?;
            let call = Call::AllReduce { op: ReduceOp::Min };
            let group = self.device_mesh().whole_group()?;
            let layouts = hash_of(&(a.layout(), other.layout()));
            let all = with_call_origin(self.origin(), layouts, || group.run(&call, &[mine], site))?.swap_remove(0);
            Ok(all.to_vec1::<u8>()?[0] == 1)
        })
    }

    /// Whether this rank has values to read: not in a dry run, not outside the mesh.
    pub(crate) fn is_readable(&self) -> bool {
        let world = self.device_mesh().world();
        !world.is_dry() && self.layout().mesh().contains(world.rank())
    }

    /// Fails unless this rank [has values to read](Self::is_readable).
    pub(in crate::tensor) fn check_readable(&self, what: &'static str) -> Result<()> {
        let world = self.device_mesh().world();
        let (found, needed, fix) = if world.is_dry() {
            ("a dry run", "a run with data", "dry runs know shapes, not values")
        } else if !self.layout().mesh().contains(world.rank()) {
            ("a rank outside the mesh", "a rank of the mesh", "test my_coordinate() first")
        } else {
            return Ok(());
        };
        Err(ErrorKind::NoData.error("reader", format!("{what} in {found}"), needed, fix))
    }
}

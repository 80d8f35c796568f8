//! Values read from a distributed tensor: always those of the whole.

use std::panic::Location;

use candle_core::{DType, Device, Tensor, WithDType};

use super::{DTensor, construct::all_of};
use crate::comm::{Call, implicitly};
use crate::error::{Error, Result, Site};
use crate::layout::Layout;
use crate::placement::ReduceOp;

impl DTensor {
    /// The value of a tensor with one element, on every rank of the mesh; pending reductions are carried out.
    #[track_caller]
    pub fn item<T: WithDType>(&self) -> Result<T> {
        let site = Location::caller();
        self.check_readable("item")?;
        if self.elem_count() != 1 {
            return Err(Error::invalid(
                "tensor for item",
                format!("shape {:?}", self.shape()),
                "a tensor with one element",
                "reduce it first, or use full_tensor",
            ));
        }
        if self.dtype() != T::DTYPE {
            return Err(Error::invalid(
                "type for item",
                T::DTYPE.as_str(),
                self.dtype().as_str(),
                "ask for the tensor's own type, or convert it first",
            ));
        }
        let replicated = Layout::replicated(self.layout().mesh(), self.shape())?;
        let whole = implicitly("item", || self.to_layout_at(&replicated, site))?;
        Ok(whole.to_local().flatten_all()?.to_vec1::<T>()?[0])
    }

    /// Whether two tensors of one mesh have the same shape, type and elements. The same answer on every rank.
    #[track_caller]
    pub fn equal(&self, other: &DTensor) -> Result<bool> {
        if self.dtype() != other.dtype() {
            return Ok(false);
        }
        self.all_elements("equal", other, Location::caller(), |a, b| Ok(a.eq(b)?))
    }

    /// Whether two tensors of one mesh have the same shape and `|a - b| <= atol + rtol * |b|` everywhere. The same answer
    /// on every rank.
    #[track_caller]
    pub fn allclose(&self, other: &DTensor, rtol: f64, atol: f64) -> Result<bool> {
        self.all_elements("allclose", other, Location::caller(), |a, b| {
            if rtol == 0.0 && atol == 0.0 && a.dtype() == b.dtype() {
                return Ok(a.eq(b)?); // also where an f64 would not hold the numbers
            }
            let (a, b) = (a.to_dtype(DType::F64)?, b.to_dtype(DType::F64)?);
            // An infinity is close to itself alone.
            let difference = (&a - &b)?.abs()?;
            let close = difference.le(&((b.abs()? * rtol)? + atol)?)?.minimum(&difference.lt(f64::INFINITY)?)?;
            Ok(close.maximum(&a.eq(&b)?)?)
        })
    }

    /// Whether a test of pairs of elements, 0 or 1 each, holds for all.
    fn all_elements(
        &self,
        name: &'static str,
        other: &DTensor,
        site: Site,
        test: impl FnOnce(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<bool> {
        self.check_readable(name)?;
        if self.shape() != other.shape() {
            return Ok(false);
        }
        implicitly(name, || {
            let a = self.reduced(site)?;
            let b = other.to_layout_at(a.layout(), site)?;
            let passed = a.to_local().elem_count() == 0 || {
                let results = test(a.to_local(), b.to_local())?.flatten_all()?.to_vec1::<u8>()?;
                results.iter().all(|&r| r == 1)
            };
            let mine = Tensor::new(&[u8::from(passed)], &Device::Cpu)?;
            let call = Call::AllReduce { op: ReduceOp::Min };
            let all = all_of(self.device_mesh())?.run(&call, &[mine], site)?.swap_remove(0);
            Ok(all.to_vec1::<u8>()?[0] == 1)
        })
    }

    /// An error where there is no value to read.
    pub(super) fn check_readable(&self, what: &'static str) -> Result<()> {
        let world = self.device_mesh().world();
        let (found, needed, fix) = if world.is_dry() {
            ("a dry run", "a run with data", "dry runs know shapes, not values")
        } else if !self.layout().mesh().contains(world.rank()) {
            ("a rank outside the mesh", "a rank of the mesh", "test my_coordinate() first")
        } else {
            return Ok(());
        };
        Err(Error::invalid("reader", format!("{what} in {found}"), needed, fix))
    }
}

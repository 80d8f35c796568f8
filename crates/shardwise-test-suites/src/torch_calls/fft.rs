//! Fourier transforms with a real result, and windows.

use candle_core::DType;
use shardwise::ops::FftNorm;
use shardwise::prelude::*;
use shardwise::tensor::WindowFunction;

use super::arguments::Arguments;
use super::calls::calls;

calls! {
    "fft.irfft(input, n=None, dim=-1, norm=None)" => |a| a.tensor("input")?.fft_irfft(points(a), a.int("dim")?, norm(a));
    "fft.hfft(input, n=None, dim=-1, norm=None)" => |a| a.tensor("input")?.fft_hfft(points(a), a.int("dim")?, norm(a));
    "fft.irfft2(input, s=None, dim=[-2,-1], norm=None)" => |a|
        a.tensor("input")?.fft_irfftn(list(a, "s").as_deref(), list(a, "dim").as_deref(), norm(a));
    "fft.irfftn(input, s=None, dim=None, norm=None)" => |a|
        a.tensor("input")?.fft_irfftn(list(a, "s").as_deref(), list(a, "dim").as_deref(), norm(a));
    "fft.hfft2(input, s=None, dim=[-2,-1], norm=None)" => |a|
        a.tensor("input")?.fft_hfftn(list(a, "s").as_deref(), list(a, "dim").as_deref(), norm(a));
    "fft.hfftn(input, s=None, dim=None, norm=None)" => |a|
        a.tensor("input")?.fft_hfftn(list(a, "s").as_deref(), list(a, "dim").as_deref(), norm(a));
    "fft.fftshift(input, dim=None)" => |a| a.tensor("input")?.fft_fftshift(list(a, "dim").as_deref());
    "fft.ifftshift(input, dim=None)" => |a| a.tensor("input")?.fft_ifftshift(list(a, "dim").as_deref());
    "signal.windows.bartlett(M, *, sym=True, dtype=None)" => |a| window(a, &WindowFunction::Bartlett);
    "signal.windows.blackman(M, *, sym=True, dtype=None)" => |a| window(a, &WindowFunction::Blackman);
    "signal.windows.cosine(M, *, sym=True, dtype=None)" => |a| window(a, &WindowFunction::Cosine);
    "signal.windows.exponential(M, *, center=None, tau=1.0, sym=True, dtype=None)" => |a|
        window(a, &WindowFunction::Exponential { center: a.optional_float("center"), tau: a.float("tau")? });
    "signal.windows.gaussian(M, *, std=1.0, sym=True, dtype=None)" => |a| window(a, &WindowFunction::Gaussian { std: a.float("std")? });
    "signal.windows.general_cosine(M, *, a, sym=True, dtype=None)" => |a| window(a, &WindowFunction::GeneralCosine(a.floats("a")));
    "signal.windows.general_hamming(M, *, alpha=0.54, sym=True, dtype=None)" => |a|
        window(a, &WindowFunction::GeneralHamming { alpha: a.float("alpha")? });
    "signal.windows.hamming(M, *, sym=True, dtype=None)" => |a| window(a, &WindowFunction::Hamming);
    "signal.windows.hann(M, *, sym=True, dtype=None)" => |a| window(a, &WindowFunction::Hann);
    "signal.windows.kaiser(M, *, beta=12.0, sym=True, dtype=None)" => |a| window(a, &WindowFunction::Kaiser { beta: a.float("beta")? });
    "signal.windows.nuttall(M, *, sym=True, dtype=None)" => |a| window(a, &WindowFunction::Nuttall);
}

fn points(a: &Arguments<'_>) -> Option<usize> {
    a.optional_int("n").map(|n| n as usize)
}

fn list(a: &Arguments<'_>, name: &str) -> Option<Vec<isize>> {
    a.has(name).then(|| a.ints(name))
}

fn norm(a: &Arguments<'_>) -> FftNorm {
    match a.text("norm").as_deref() {
        Some("ortho") => FftNorm::Ortho,
        Some("forward") => FftNorm::Forward,
        _ => FftNorm::Backward,
    }
}

fn window(a: &Arguments<'_>, window: &WindowFunction) -> Result<DTensor> {
    let dtype = a.dtype("dtype").unwrap_or(DType::F32);
    DTensor::window(window, a.flag("sym"), a.size("M")?, dtype, a.mesh(), a.replicated())
}

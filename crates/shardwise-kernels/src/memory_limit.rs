//! The memory of the machine or container, against which tensors are checked before they are allocated.
//!
//! Linux overcommits: an allocation larger than the memory may succeed, and the OOM killer ends the process when the pages
//! are touched. So a tensor is refused by its size instead of by a failed allocation.

use std::sync::OnceLock;

use crate::error::{Error, ErrorKind, Result};

/// Bytes of memory that this process can use: RAM and swap of the machine, or the limit of its cgroup if that is lower.
///
/// Read once per process. `isize::MAX` on systems other than Linux.
pub fn memory_bytes() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| cgroup_limit().into_iter().chain([ram_and_swap()]).min().expect("at least one value"))
}

/// Checks that `count` elements of `elem` bytes each fit into [`memory_bytes`].
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] if they do not, or if their size overflows.
pub fn check_bytes(count: usize, elem: usize) -> Result<()> {
    match count.checked_mul(elem) {
        Some(bytes) if bytes <= memory_bytes() => Ok(()),
        _ => Err(out_of_memory(
            count,
            elem,
            &format!("at most {}, the memory of this machine", gigabytes(memory_bytes())),
        )),
    }
}

/// The error for `count` elements of `elem` bytes that cannot be allocated; `needed` is what would have fit.
#[cold]
pub(super) fn out_of_memory(count: usize, elem: usize, needed: &str) -> Error {
    let found = format!("{count} elements of {elem} byte(s), {}", gigabytes(count.saturating_mul(elem)));
    ErrorKind::OutOfMemory { bytes: count.saturating_mul(elem) as u64, limit: memory_bytes() as u64 }.error(
        "tensor",
        found,
        needed,
        "check the sizes, or use smaller tensors or more ranks",
    )
}

fn gigabytes(bytes: usize) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

#[cfg(target_os = "linux")]
fn ram_and_swap() -> usize {
    // SAFETY: all zeros is a value of this struct of integers, and the call fills in nothing but it.
    let (info, code) = unsafe {
        let mut info: libc::sysinfo = std::mem::zeroed();
        let code = libc::sysinfo(&mut info);
        (info, code)
    };
    let unit = info.mem_unit as u128;
    let bytes = (u128::from(info.totalram) + u128::from(info.totalswap)) * unit;
    if code == 0 && bytes > 0 { usize::try_from(bytes).unwrap_or(usize::MAX) } else { isize::MAX as usize }
}

/// Without `sysinfo`, only the address space bounds a tensor before it is allocated.
#[cfg(not(target_os = "linux"))]
fn ram_and_swap() -> usize {
    isize::MAX as usize
}

/// The memory limit of this process's cgroup (version 2, else version 1), if it has one.
fn cgroup_limit() -> Option<usize> {
    let limit = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<usize>().ok();
    limit("/sys/fs/cgroup/memory.max").or_else(|| limit("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
}

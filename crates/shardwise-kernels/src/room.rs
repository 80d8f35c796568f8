//! Whether memory can hold so many elements at all, asked before anything is allocated.
//!
//! An allocator may promise memory that does not exist and leave it to the kernel to end the process when it is touched, so
//! a failed allocation alone does not tell.

use std::sync::OnceLock;

use crate::error::{Error, ErrorKind, Result};

/// Bytes of memory and swap of this machine, or what a container leaves this process of them.
pub fn memory_bytes() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| container().into_iter().chain([machine()]).min().expect("one at least"))
}

/// An error if so many elements of a size do not fit into the memory of this machine.
pub fn check_bytes(count: usize, elem: usize) -> Result<()> {
    match count.checked_mul(elem) {
        Some(bytes) if bytes <= memory_bytes() => Ok(()),
        _ => Err(refused(count, elem, &format!("at most {}, the memory of this machine", gigabytes(memory_bytes())))),
    }
}

/// The error for elements that have no room.
#[cold]
pub(super) fn refused(count: usize, elem: usize, needed: &str) -> Error {
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
fn machine() -> usize {
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

/// Elsewhere only the address space bounds a tensor before it is allocated.
#[cfg(not(target_os = "linux"))]
fn machine() -> usize {
    isize::MAX as usize
}

/// The limit of the control group that this process is in, if it has one.
fn container() -> Option<usize> {
    let limit = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<usize>().ok();
    limit("/sys/fs/cgroup/memory.max").or_else(|| limit("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
}

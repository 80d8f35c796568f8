//! Processor, memory, devices, MPI and files.

use std::io::Write;
use std::path::Path;

use shardwise::comm::engine::available_cores;
use shardwise::read_file::{MOST_CONFIG_BYTES, read_text};

use super::{Finding, Verdict};
use crate::processes;

/// Memory below which even small models do not train.
const LITTLE_MEMORY: u64 = 512 << 20;

/// Free disk space below which a checkpoint of a small model does not fit.
const LITTLE_SPACE: u64 = 1 << 30;

pub(super) fn findings() -> Vec<Finding> {
    vec![build(), cores(), memory(), instruction_sets(), devices(), mpi(), files()]
}

/// The time of `bench kernels` over the floor was 27 for matmul in a development build.
fn build() -> Finding {
    match cfg!(debug_assertions) {
        true => {
            let advice = "build with --release: kernels are ten times faster or more";
            Finding::with(Verdict::Note, "build", "a development build", advice)
        }
        false => Finding::ok("build", "optimized"),
    }
}

fn cores() -> Finding {
    let usable = available_cores();
    let all = read_text("/proc/cpuinfo", MOST_CONFIG_BYTES).unwrap_or_default();
    let all = all.lines().filter(|line| line.starts_with("processor")).count().max(usable);
    let text = if all == usable { format!("{usable}") } else { format!("{usable} of the {all} of this machine") };
    // Threads that run or wait for a core, on average over a minute.
    let load = read_text("/proc/loadavg", MOST_CONFIG_BYTES).unwrap_or_default();
    match load.split(' ').next().and_then(|load| load.parse::<f64>().ok()) {
        Some(load) if load > all as f64 => {
            let advice = "training and the self-test are slower than they could be";
            Finding::with(
                Verdict::Note,
                "cores",
                format!("{text}, which {load:.0} threads of all programs share"),
                advice,
            )
        }
        _ => Finding::ok("cores", text),
    }
}

fn memory() -> Finding {
    let meminfo = read_text("/proc/meminfo", MOST_CONFIG_BYTES).unwrap_or_default();
    let number = |name: &str| -> Option<u64> {
        let line = meminfo.lines().find(|line| line.starts_with(name))?;
        Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
    };
    let usable = shardwise_kernels::memory_bytes() as u64;
    let (Some(all), Some(free)) = (number("MemTotal:"), number("MemAvailable:")) else {
        return Finding::with(Verdict::Note, "memory", "unknown on this system", "tensors are allocated unchecked");
    };
    let mut text = format!("{}, of which {} are available", gigabytes(all), gigabytes(free));
    if usable < all {
        text += &format!("; at most {} in this container", gigabytes(usable));
    }
    match free.min(usable) < LITTLE_MEMORY {
        true => Finding::with(Verdict::Note, "memory", text, "end other programs before you train"),
        false => Finding::ok("memory", text),
    }
}

fn instruction_sets() -> Finding {
    let sets = shardwise_kernels::instruction_sets();
    let widest = sets.last().copied().unwrap_or_default();
    let asked = std::env::var("SHARDWISE_SIMD").ok().filter(|name| sets.contains(&name.as_str()));
    let used = asked.as_deref().unwrap_or(widest);
    let text = format!("{used} in use; this processor has {}", sets.join(", "));
    match used == widest {
        true => Finding::ok("instructions", text),
        false => Finding::with(Verdict::Note, "instructions", text, "unset SHARDWISE_SIMD to use the widest set"),
    }
}

fn devices() -> Finding {
    Finding::ok("devices", "cpu, the only kind that kernels are written for")
}

fn mpi() -> Finding {
    let launched = processes::launched();
    let job = launched.as_ref().map_or("not started by a launcher".to_string(), |job| {
        format!("started by {} as process {} of {}", job.by, job.rank, job.size)
    });
    #[cfg(feature = "mpi")]
    {
        let library = mpi::environment::library_version().unwrap_or_default();
        // Libraries go on with how they were built.
        let library = library.split([',', '\n', '\0']).next().unwrap_or_default().trim().to_string();
        let (major, minor) = mpi::environment::version();
        Finding::ok("mpi", format!("{library}, MPI {major}.{minor}, with the bindings of rsmpi; {job}"))
    }
    #[cfg(not(feature = "mpi"))]
    match launched {
        Some(_) => {
            Finding::with(Verdict::Wrong, "mpi", format!("not in this build, {job}"), "build with `--features mpi`")
        }
        None => Finding::ok("mpi", "not in this build; `--features mpi` adds it"),
    }
}

/// The file system of the current directory, to which runs write.
fn files() -> Finding {
    let Ok(here) = std::env::current_dir() else {
        let advice = "change to a directory that exists";
        return Finding::with(Verdict::Wrong, "files", "the current directory does not exist", advice);
    };
    let kind = file_system(&here).map_or(String::new(), |kind| format!("{kind}, "));
    let free = rustix::fs::statvfs(&here).map(|stat| stat.f_bavail * stat.f_frsize);
    let free_text = free.map_or("unknown space".into(), |free| format!("{} free", gigabytes(free)));
    let text = format!("{kind}{free_text} in {}", here.display());
    let probe = here.join(format!(".shardwise-doctor-{}", std::process::id()));
    let written =
        std::fs::File::create(&probe).and_then(|mut file| file.write_all(b"x").and_then(|()| file.sync_all()));
    let _ = std::fs::remove_file(&probe);
    match written {
        Err(error) => {
            let advice = "runs need a directory that they can write to: `train --out DIR`";
            Finding::with(Verdict::Note, "files", format!("{text}, which cannot be written to: {error}"), advice)
        }
        Ok(()) if free.is_ok_and(|free| free < LITTLE_SPACE) => Finding::with(
            Verdict::Note,
            "files",
            text,
            "free some space, or name another directory with `train --out DIR`",
        ),
        Ok(()) => Finding::ok("files", text),
    }
}

/// The type of the file system that a directory is on: that of the longest mount point above it.
fn file_system(directory: &Path) -> Option<String> {
    let directory = directory.canonicalize().ok()?;
    let mounts = read_text("/proc/self/mountinfo", MOST_CONFIG_BYTES).ok()?;
    let mounts = mounts.lines().filter_map(|line| {
        let (mount, rest) = line.split_once(" - ")?;
        let point = mount.split(' ').nth(4)?.replace("\\040", " ");
        directory.starts_with(&point).then(|| (point.len(), rest.split(' ').next().unwrap_or_default().to_string()))
    });
    // The last of several on one point hides those before it.
    mounts.max_by_key(|(length, _)| *length).map(|(_, kind)| kind)
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

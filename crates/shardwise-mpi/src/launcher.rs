//! Who started this process: `mpirun` or `srun` as one of many, or a person as the only one.

use std::ffi::OsString;

/// What the launcher says of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launched {
    /// The launcher, as it is to be called in messages.
    pub by: &'static str,
    /// This process among those that were started together.
    pub rank: usize,
    /// How many were started together.
    pub size: usize,
}

/// Variables that a launcher sets for each process: its name, rank, number of processes. Those of an MPI launcher come
/// first, because under Slurm an `mpirun` has Slurm's variables as well.
const VARIABLES: [(&str, &str, &str); 4] = [
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE"),
    ("srun", "PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
];

/// What the launcher says of this process; nothing if a person started it.
pub fn launched() -> Option<Launched> {
    detect(|name| std::env::var_os(name))
}

fn detect(variable: impl Fn(&str) -> Option<OsString>) -> Option<Launched> {
    let number = |name: &str| variable(name)?.to_str()?.parse::<usize>().ok();
    VARIABLES.iter().find_map(|&(by, rank, size)| {
        let (rank, size) = (number(rank)?, number(size)?);
        // A step of one task is also what an interactive shell runs in.
        (rank < size && (by != "srun" || size > 1)).then_some(Launched { by, rank, size })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(variables: &[(&str, &str)]) -> Option<Launched> {
        detect(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn launchers_are_known_by_their_variables() {
        let launched = |by, rank, size| Some(Launched { by, rank, size });
        assert_eq!(with(&[]), None);
        assert_eq!(with(&[("HOME", "/"), ("PMI_RANK", "1")]), None);
        assert_eq!(with(&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")]), launched("mpirun", 1, 4));
        assert_eq!(with(&[("PMI_RANK", "0"), ("PMI_SIZE", "1")]), launched("mpirun", 0, 1));
        let srun = [("SLURM_PROCID", "2"), ("SLURM_STEP_NUM_TASKS", "3")];
        assert_eq!(with(&srun), launched("srun", 2, 3));
        // a shell in an allocation
        assert_eq!(with(&[("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")]), None);
        // a batch script has a number but no step; it is one process
        assert_eq!(with(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]), None);
        // mpirun inside a Slurm allocation
        let both = [&srun[..], &[("OMPI_COMM_WORLD_RANK", "5"), ("OMPI_COMM_WORLD_SIZE", "8")]].concat();
        assert_eq!(with(&both), launched("mpirun", 5, 8));
        assert_eq!(with(&[("PMI_RANK", "x"), ("PMI_SIZE", "1")]), None);
        assert_eq!(with(&[("PMI_RANK", "4"), ("PMI_SIZE", "2")]), None);
    }
}

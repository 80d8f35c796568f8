//! Detection of the launcher, `mpirun` or `srun`, from environment variables.

use std::ffi::OsString;

/// Rank and number of processes that a launcher assigned to this process; [`launched`] returns it.
#[doc(alias = "is_torchelastic_launched")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launched {
    /// Name of the launcher: `mpirun` or `srun`.
    pub by: &'static str,
    /// Rank of this process in the job.
    #[doc(alias = "RANK")]
    pub rank: usize,
    /// Number of processes of the job.
    #[doc(alias = "WORLD_SIZE")]
    pub size: usize,
}

/// Launcher, and the variables that it sets for rank and number of processes. `mpirun` comes first, because inside a Slurm
/// allocation its processes have Slurm's variables as well.
const VARIABLES: [(&str, &str, &str); 4] = [
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE"),
    ("srun", "PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
];

/// Reads which launcher started this process; `None` without a launcher.
///
/// Local, and available without the feature `mpi`: it reads environment variables only.
pub fn launched() -> Option<Launched> {
    detect(|name| std::env::var_os(name))
}

fn detect(variable: impl Fn(&str) -> Option<OsString>) -> Option<Launched> {
    let number = |name: &str| variable(name)?.to_str()?.parse::<usize>().ok();
    VARIABLES.iter().find_map(|&(by, rank, size)| {
        let (rank, size) = (number(rank)?, number(size)?);
        // An interactive shell in a Slurm allocation is a step of one task, too.
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
    fn launchers_are_detected_by_their_variables() {
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

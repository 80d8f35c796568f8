//! `--search`: meshes and plans for a number of ranks, ranked by dry runs.

use serde::Serialize;
use shardwise::Mesh;
use shardwise::Result;
use shardwise::error::ErrorKind;
use shardwise::picture::{bytes_text, time_text};
use shardwise::plan::StepReport;

use super::job::PlanJob;
use crate::output::{RowPrinter, TableRow};
use crate::train::settings::PlanChoice;

/// A mesh with a plan.
#[derive(Serialize)]
struct CandidateRow {
    mesh: String,
    plan: String,
    fits: Option<bool>,
    peak_bytes: usize,
    compute_us: f64,
    communication_us: f64,
    /// Without overlap.
    us: f64,
    overlapped_us: f64,
    /// Batches of one sample take the same time for fewer samples, so this is what counts.
    us_per_sample: f64,
}

impl TableRow for CandidateRow {
    fn columns(&self) -> Vec<(&'static str, i32, String)> {
        let fits = match self.fits {
            Some(true) => "yes",
            Some(false) => "no",
            None => "-",
        };
        vec![
            ("mesh", -16, self.mesh.clone()),
            ("plan", -8, self.plan.clone()),
            ("fits", -4, fits.to_string()),
            ("peak", 9, bytes_text(self.peak_bytes)),
            ("step", 9, time_text(self.us)),
            ("overlapped", 10, time_text(self.overlapped_us)),
            ("per sample", 10, time_text(self.us_per_sample)),
        ]
    }
}

/// Widest tensor parallelism that is tried: more ranks than this share no fast link anywhere.
const MAX_TP: usize = 64;

/// Prints the candidates; whether one of them fits into memory, if there is a limit.
pub(super) fn run(job: &PlanJob, json: bool) -> Result<bool> {
    let candidates = candidates(job)?;
    let mut rows = RowPrinter::new(json, candidates.len() as u64);
    let mut found = Vec::new();
    let mut last_error = None;
    for candidate in candidates {
        rows.announce(&format!("{} {}", candidate.mesh, candidate.plan_name()));
        match candidate.report() {
            Ok(report) => found.push(row(&report)),
            // Some meshes do not divide the model; the search goes on with the remaining ones.
            Err(error) => last_error = Some(error),
        }
    }
    if let (true, Some(error)) = (found.is_empty(), last_error) {
        return Err(error);
    }
    found.sort_by(|a, b| {
        (a.fits == Some(false)).cmp(&(b.fits == Some(false))).then(a.us_per_sample.total_cmp(&b.us_per_sample))
    });
    found.iter().try_for_each(|row| rows.print(row))?;
    Ok(found.iter().any(|row| row.fits != Some(false)))
}

fn row(report: &StepReport) -> CandidateRow {
    CandidateRow {
        mesh: report.mesh.to_string(),
        plan: report.plan.clone(),
        fits: report.fits(),
        peak_bytes: report.peak_bytes(),
        compute_us: report.compute_us(),
        communication_us: report.communication_us(),
        us: report.us(),
        overlapped_us: report.overlapped_us(),
        us_per_sample: report.us() / report.batch as f64,
    }
}

/// All divisions of the ranks into dp and tp, with all plans for each. Heads need not divide: tensor parallelism takes any number.
fn candidates(job: &PlanJob) -> Result<Vec<PlanJob>> {
    let ranks = job.mesh.size();
    let mut all = Vec::new();
    for tp in (1..=ranks.min(MAX_TP)).filter(|tp| ranks.is_multiple_of(*tp)) {
        let dp = ranks / tp;
        let mesh = match (dp, tp) {
            (dp, 1) => Mesh::new([("dp", dp)])?,
            (1, tp) => Mesh::new([("tp", tp)])?,
            (dp, tp) => Mesh::new([("dp", dp), ("tp", tp)])?,
        };
        let plans: &[PlanChoice] = match (dp, tp) {
            (_, 1) => &[PlanChoice::Ddp, PlanChoice::Fsdp],
            (1, _) => &[PlanChoice::Tp],
            _ => &[PlanChoice::Tp, PlanChoice::FsdpTp],
        };
        all.extend(plans.iter().map(|&plan| job.with(mesh.clone(), plan, job.batch)));
    }
    if all.is_empty() {
        let found = format!("{ranks} rank(s)");
        return Err(ErrorKind::Mesh.error("mesh", found, "a number of ranks that has divisors", "use another number"));
    }
    Ok(all)
}

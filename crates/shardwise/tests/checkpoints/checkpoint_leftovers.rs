//! What killed processes leave next to the checkpoints of a series, and links to directories.

use std::fs;
use std::path::Path;

use shardwise::checkpoint::{self, ConvertOptions, Format, Series, State, convert};
use shardwise::prelude::*;
use shardwise_test_suites::scratch::Scratch;

/// Names in a directory.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Other systems do not list processes as files: staging directories stay there.
#[test]
#[cfg(target_os = "linux")]
fn a_save_of_a_series_removes_what_killed_processes_have_left_of_other_steps() {
    let scratch = Scratch::new("leftovers");
    let root = scratch.0.join("run");
    let series = Series::new(&root).keep(1);
    let save = |steps: &'static [u64]| {
        let series = series.clone();
        launch(2, move |world| {
            steps.iter().try_for_each(|&step| series.save(&world, step, &State::map([("step", step as i64)])))
        })
        .unwrap();
    };
    save(&[1]);
    // Killed while a checkpoint was removed, and while one was saved: no process has this number.
    let left = [".removed-00000001", ".removed-00000000", ".step-00000007.incoming-2147483647-0000000000000001"];
    for name in left {
        fs::create_dir(root.join(name)).unwrap();
        fs::write(root.join(name).join("part-00000.safetensors"), "x").unwrap();
    }
    // Process 1 runs, and the last two are not names of the series.
    let kept = [".removed-by-me", ".step-00000007.incoming-1-0000000000000001", "notes"];
    kept.iter().for_each(|name| fs::create_dir(root.join(name)).unwrap());
    // The first checkpoint is removed to a name that is taken.
    save(&[2]);
    let expected = [&kept[..], &["step-00000002"]].concat();
    assert_eq!(names(&root), expected);
    assert!(checkpoint::verify(series.path(2), &|_| {}).is_intact());
}

#[test]
#[cfg(unix)]
fn a_conversion_into_a_link_fills_the_directory_that_it_leads_to() {
    let scratch = Scratch::new("links");
    let (source, disk, link) = (scratch.0.join("source"), scratch.0.join("disk"), scratch.0.join("link"));
    let place = source.clone();
    launch(1, move |world| checkpoint::save(&world, &place, &State::map([("step", 1)]))).unwrap();
    fs::create_dir_all(disk.join("model")).unwrap();
    std::os::unix::fs::symlink(disk.join("model"), &link).unwrap();
    // the second one replaces a checkpoint
    for format in [Format::Native, Format::Dcp] {
        convert(&source, &link, &ConvertOptions::to(format), &|_| {}).unwrap();
        assert!(link.is_symlink());
        assert_eq!(names(&disk), ["model"]);
        for path in [&link, &disk.join("model")] {
            assert_eq!(checkpoint::open(path).unwrap().value("step").unwrap().read::<i64>().unwrap(), 1, "{path:?}");
        }
    }
    fs::remove_dir_all(&disk).unwrap();
    let error = convert(&source, &link, &ConvertOptions::to(Format::Native), &|_| {}).unwrap_err().to_string();
    assert!(error.contains("leads nowhere") && error.contains("remove the link"), "{error}");
    let place = link.clone();
    let error = launch(1, move |world| checkpoint::save(&world, &place, &State::map([("step", 1)]))).unwrap_err();
    assert!(error.to_string().contains("leads nowhere"), "{error}");
    assert!(link.is_symlink());
}

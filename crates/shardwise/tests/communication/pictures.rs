//! Pictures of meshes, layouts and redistributions, compared with golden files: texts in `tests/data/pictures`, SVG documents in
//! `docs/images`, which the guide shows.
//!
//! `SHARDWISE_UPDATE_PICTURES=1 cargo test --workspace --test communication pictures` writes the files anew.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use shardwise::prelude::*;
use shardwise::redistribute::explain;
use shardwise::{DryWorld, TensorBox};
use shardwise_test_suites::vectors::{self, RecordedPlacement};

/// Name, shape, mesh, placements and shard order of a picture per kind of placement.
type Drawn = (&'static str, &'static [usize], &'static str, &'static str, &'static [&'static str]);

const LAYOUTS: [Drawn; 9] = [
    ("shard", &[8, 64], "dp=2,tp=2", "S(0),S(1)", &[]),
    ("replicate", &[8, 64], "dp=2,tp=2", "R,S(1)", &[]),
    ("partial", &[8, 64], "dp=2,tp=2", "P(sum),S(1)", &[]),
    ("uneven", &[7, 3], "dp=4", "S(0)", &[]),
    ("ragged", &[10, 4], "dp=3", "S(0;5,2,3)", &[]),
    ("strided", &[12, 4], "dp=2", "SS(0,3)", &[]),
    ("block-cyclic", &[12, 4], "dp=2", "BC(0,2)", &[]),
    ("ordered", &[8, 4], "dp=2,tp=2", "S(0),S(0)", &["tp", "dp"]),
    ("three-dimensions", &[4, 16, 32], "dp=2,tp=4", "S(0),S(2)", &[]),
];

fn layout(shape: &[usize], mesh: &str, placements: &str, order: &[&str]) -> Layout {
    let mesh: Mesh = mesh.parse().unwrap();
    let placements = Placement::parse_list(placements).unwrap();
    let orders: Vec<(usize, &[&str])> = if order.is_empty() { vec![] } else { vec![(0, order)] };
    Layout::with_shard_order(&mesh, shape.to_vec(), placements, &orders).unwrap()
}

fn compare(file: &Path, found: &str) {
    if std::env::var_os("SHARDWISE_UPDATE_PICTURES").is_some() {
        std::fs::write(file, found).unwrap();
    }
    let expected = std::fs::read_to_string(file).unwrap_or_default();
    assert!(found == expected, "{} is not:\n{found}\nSHARDWISE_UPDATE_PICTURES=1 writes the files", file.display());
}

fn compare_both(name: &str, text: &str, svg: &str) {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    compare(&package.join("tests/data/pictures").join(format!("{name}.txt")), text);
    let images: PathBuf = package.join("../../docs/images");
    compare(&images.join(format!("layout-{name}.svg")), svg);
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    check_svg(svg);
}

/// Tags are closed, and nothing is drawn outside of the picture.
fn check_svg(svg: &str) {
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{svg}");
    assert_eq!(svg.matches("<text ").count(), svg.matches("</text>").count());
    let number = |line: &str, name: &str| -> usize {
        let start = line.find(&format!(" {name}=\"")).map(|at| at + name.len() + 3);
        start.and_then(|at| line[at..].split('"').next()?.parse().ok()).unwrap_or(0)
    };
    let head = svg.lines().next().unwrap();
    let (width, height) = (number(head, "width"), number(head, "height"));
    for line in svg.lines().filter(|line| line.starts_with("<rect ")) {
        assert!(number(line, "x") + number(line, "width") <= width, "{line}");
        assert!(number(line, "y") + number(line, "height") <= height, "{line}");
    }
}

#[test]
fn every_kind_of_placement_is_drawn_as_in_the_golden_files() {
    for (name, shape, mesh, placements, order) in LAYOUTS {
        let picture = layout(shape, mesh, placements, order).picture();
        compare_both(name, &picture.to_string(), &picture.to_svg());
    }
}

#[test]
fn a_mesh_and_a_redistribution_are_drawn_as_in_the_golden_files() {
    let mesh = Mesh::new([("pp", 2), ("dp", 2), ("tp", 4)]).unwrap().picture();
    compare_both("mesh", &mesh.to_string(), &mesh.to_svg());
    let (from, to) = (layout(&[8, 64], "dp=2,tp=2", "P(sum),S(1)", &[]), layout(&[8, 64], "dp=2,tp=2", "S(0),R", &[]));
    let explain = |world: World| explain(&world.mesh([("dp", 2), ("tp", 2)])?, &from, &to, DType::F32);
    let picture = DryWorld::new(4).unwrap().run(explain).unwrap().value.picture(DType::F32);
    compare_both("redistribution", &picture.to_string(), &picture.to_svg());
}

#[test]
fn the_mesh_of_a_world_has_its_links() {
    let shown = DryWorld::new(2).unwrap().run(|world| Ok(world.mesh([("tp", 2)])?.show())).unwrap().value;
    assert!(shown.contains("axis tp: 2 ranks, link 1us,8GB/s"), "{shown}");
}

#[test]
fn dimensions_are_chosen_and_checked() {
    let layout = layout(&[4, 16, 32], "dp=2,tp=4", "S(0),S(2)", &[]);
    let text = layout.picture().dims(0, 1).unwrap().to_string();
    assert!(text.contains("rows: dimension 0; columns: dimension 1; dimension 2 at index 0 of 32"), "{text}");
    for (rows, columns) in [(0, 0), (0, 3), (3, 0)] {
        let error = layout.picture().dims(rows, columns).unwrap_err().to_string();
        assert!(error.contains("two dimensions of a tensor that has 3"), "{error}");
    }
}

#[test]
fn colours_are_in_the_text_only_if_asked_for() {
    let picture = layout(&[8, 8], "dp=2", "S(0)", &[]).picture();
    assert!(
        !picture.to_text(80, false).contains('\u{1b}') && picture.to_text(80, true).contains("\u{1b}[30;48;5;153m")
    );
}

#[derive(Deserialize)]
struct Case {
    global_shape: Vec<usize>,
    mesh_shape: Vec<usize>,
    placements: Vec<RecordedPlacement>,
    torch_error: Option<String>,
}

/// Every recorded layout is drawn within the width, as text and as SVG, and each rank that holds an element of the drawn part is
/// in it, as long as nothing is abbreviated.
#[test]
fn every_recorded_layout_is_drawn() {
    vectors::run("local_shards", |case| {
        let case = Case::deserialize(case).map_err(|e| e.to_string())?;
        let mesh = Mesh::new(case.mesh_shape).map_err(|e| e.to_string())?;
        let placements: Vec<Placement> = case.placements.iter().map(RecordedPlacement::to_placement).collect();
        let layout = match (Layout::new(&mesh, case.global_shape.as_slice(), placements), case.torch_error) {
            (Err(_), Some(_)) => return Ok(()),
            (layout, _) => layout.map_err(|e| e.to_string())?,
        };
        let text = layout.picture().to_string();
        check_svg(&layout.picture().to_svg());
        if let Some(line) = text.lines().find(|line| line.chars().count() > 80) {
            return Err(format!("{line} is longer than 80 columns"));
        }
        let at_origin = |b: &TensorBox| b.offsets.iter().skip(2).all(|&o| o == 0);
        let boxes: Vec<&str> = text.lines().filter(|line| line.contains('│')).collect();
        for rank in mesh.ranks().iter().filter(|&&r| layout.boxes_of(r).iter().any(|b| at_origin(&b.global))) {
            let is_drawn = boxes.iter().any(|line| names(line).contains(rank));
            if layout.shape().len() <= 2 && !text.contains('…') && !is_drawn {
                return Err(format!("rank {rank} is not in\n{text}"));
            }
        }
        Ok(())
    });
}

/// The ranks in the boxes of a line, ranges included.
fn names(line: &str) -> Vec<usize> {
    let cells = line.split('│').skip(1);
    let words = cells.flat_map(|cell| cell.split(['+', ','])).map(str::trim).filter(|word| !word.is_empty());
    let ranks = words.flat_map(|word| {
        let (first, last) = word.split_once('-').unwrap_or((word, word));
        let (first, last) = (first.parse().unwrap_or(1), last.parse().unwrap_or(0));
        first..=last
    });
    ranks.collect()
}

/// A layout on thousands of ranks is drawn as fast as a small one, abbreviated.
#[test]
fn a_picture_of_16384_ranks_is_small() {
    let picture = layout(&[16_384, 8192], "dp=128,tp=128", "S(0),S(1)", &[]).picture();
    let text = picture.to_string();
    assert!(text.lines().count() < 60 && text.contains('…') && text.contains("16383"), "{text}");
    assert!(text.contains("every rank holds [128, 64], 32.8 kB"), "{text}");
    check_svg(&picture.to_svg());
}

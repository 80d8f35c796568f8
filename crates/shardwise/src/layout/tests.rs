use super::*;
use crate::placement::{Placement::*, ReduceOp};

fn mesh(text: &str) -> Mesh {
    text.parse().unwrap()
}

fn layout(mesh_text: &str, shape: &[usize], placements: &str) -> Result<Layout> {
    Layout::new(&mesh(mesh_text), shape, Placement::parse_list(placements).unwrap())
}

#[test]
fn bad_layouts_are_refused_with_the_reason() {
    for (mesh, shape, placements, parts) in [
        ("dp=2,tp=2", &[4][..], "S(0)", &["1 placement(s)", "2, one per mesh axis"][..]),
        ("dp=2", &[4], "S(1)", &["S(1)", "from -1 to 0"]),
        ("dp=2", &[], "S(0)", &["no shard of a scalar"]),
        ("dp=2", &[4], "S(0;1,2)", &["[1, 2]", "add up to 4"]),
        ("dp=2", &[4], "S(0;1,2,1)", &["3 sizes", "needed 2"]),
        ("dp=2", &[4], "S(0;18446744073709551615,5)", &["add up to 4"]),
        ("dp=2,tp=2", &[5], "S(0),S(0;2,1)", &["[2, 1]", "add up to 2"]),
        ("dp=2", &[4], "SS(0,0)", &["split factor 0"]),
        ("dp=2", &[4], "BC(0,0)", &["BC(0,0)", "blocks of size 0", "`dp`"]),
    ] {
        let message = layout(mesh, shape, placements).expect_err(placements).to_string();
        assert!(parts.iter().all(|p| message.contains(p)), "{parts:?} missing in: {message}");
    }
    let two = mesh("dp=2,tp=2");
    for (order, part) in [
        (vec![(0, &["dp"][..])], "each of `dp,tp` once"),
        (vec![(0, &["dp", "dp"])], "each of `dp,tp` once"),
        (vec![(1, &["dp", "tp"])], "below 1"),
        (vec![(0, &["dp", "xx"])], "`xx`"),
    ] {
        let message = Layout::with_shard_order(&two, 4, [Shard(0), Shard(0)], &order).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn equivalent_placements_are_one_layout() {
    let same =
        |a: &str, b: &str| assert_eq!(layout("a=2,b=2", &[5, 6], a).unwrap(), layout("a=2,b=2", &[5, 6], b).unwrap());
    same("S(-1),R", "S(1),R");
    same("S(0;3,2),R", "S(0),R");
    same("SS(0,1),R", "S(0),R");
    same("S(1),S(1;1,2)", "S(1),S(1;1,2,1,2)");
    same("S(0),S(0;2,1,1,1)", "S(0),S(0)");
    same("BC(0,3),R", "S(0),R");
    same("S(1),BC(1,2)", "S(1),S(1)");
    assert_eq!(layout("a=1", &[5], "BC(0,2)").unwrap(), layout("a=1", &[5], "S(0)").unwrap());
    assert_ne!(layout("a=2", &[5], "BC(0,2)").unwrap(), layout("a=2", &[5], "S(0)").unwrap());
    assert_ne!(layout("a=2", &[4], "S(0)").unwrap(), layout("b=2", &[4], "S(0)").unwrap());
    // the position of an axis of size 1 does not matter
    let one = mesh("a=2,b=1");
    let a = Layout::with_shard_order(&one, 4, [Shard(0), Shard(0)], &[(0, &["a", "b"])]).unwrap();
    let b = Layout::with_shard_order(&one, 4, [Shard(0), Shard(0)], &[(0, &["b", "a"])]).unwrap();
    assert_eq!(a, b);
    assert!(a.has_default_order());
}

#[test]
fn axes_may_be_partial_with_different_reductions() {
    let mixed = layout("a=2,b=2", &[4], "P(sum),P(max)").unwrap();
    assert!(mixed.is_partial() && !mixed.is_replicated());
    assert_eq!(mixed.placements()[1], Partial(ReduceOp::Max));
    assert_eq!(mixed.local_shape(3), [4]);
}

#[test]
fn an_inner_axis_divides_what_the_outer_axis_has_left() {
    // the worked example: 5 columns over 2x2
    let nested = layout("a=2,b=2", &[3, 5], "S(1),S(1)").unwrap();
    let held: Vec<_> = (0..4).map(|r| (nested.local_shape(r)[1], nested.global_offset(r)[1])).collect();
    assert_eq!(held, [(2, 0), (1, 2), (1, 3), (1, 4)]);
    // sizes of an inner ragged shard may depend on the outer coordinate
    let ragged = layout("a=2,b=2", &[7], "S(0;3,4),S(0;1,2,4,0)").unwrap();
    let held: Vec<_> = (0..4).map(|r| (ragged.local_shape(r)[0], ragged.global_offset(r)[0])).collect();
    assert_eq!(held, [(1, 0), (2, 1), (4, 3), (0, 7)]);
}

#[test]
fn ranks_outside_the_mesh_hold_nothing() {
    let part = layout("a=2@1,3", &[4, 4], "S(0)").unwrap();
    assert_eq!((part.local_shape(0), part.global_offset(0)), (vec![0], vec![]));
    assert!(part.boxes_of(0).is_empty() && part.global_indices(0, 0).is_empty());
    assert_eq!(part.global_offset(3), [2, 0]);
}

#[test]
fn strided_and_ordered_forms_convert_only_where_they_agree() {
    let two = mesh("dp=4,tp=2");
    let order: &[(usize, &[&str])] = &[(0, &["tp", "dp"])];
    let even = Layout::with_shard_order(&two, 16, [Shard(0), Shard(0)], order).unwrap();
    assert_eq!(even.to_strided().unwrap().placements()[0], Placement::strided(0, 2));
    assert_eq!(even.to_strided().unwrap().to_shard_order().unwrap(), even);
    // 9 rows: strided gives the last row to (3,0), ordered to (3,1)
    let uneven = Layout::with_shard_order(&two, 9, [Shard(0), Shard(0)], order).unwrap();
    let message = uneven.to_strided().unwrap_err().to_string();
    assert!(message.contains("own different elements"), "{message}");
    let alone = layout("dp=4", &[9], "SS(0,2)").unwrap();
    assert!(alone.to_shard_order().unwrap_err().to_string().contains("not the size of any axes"));
    assert_eq!(alone.boxes_of(0).len(), 2);
}

#[test]
fn serde_round_trips_and_checks() {
    let two = mesh("dp=2,tp=2");
    let ordered = Layout::with_shard_order(&two, (8, 3), [Shard(0), Shard(0)], &[(0, &["tp", "dp"])]).unwrap();
    assert_eq!(ordered.to_string(), "[8, 3] on dp=2,tp=2: S(0), S(0); dim 0 sharded by tp then dp");
    for layout in [ordered, layout("dp=2", &[5], "S(0;1,4)").unwrap()] {
        let json = serde_json::to_string(&layout).unwrap();
        assert_eq!(serde_json::from_str::<Layout>(&json).unwrap(), layout);
    }
    let bad = r#"{"mesh":"dp=2","shape":[4],"placements":["S(3)"]}"#;
    assert!(serde_json::from_str::<Layout>(bad).unwrap_err().to_string().contains("S(3)"));
}

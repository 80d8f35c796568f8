use super::*;

fn error(result: Result<Mesh>) -> String {
    result.expect_err("should be refused").to_string()
}

#[test]
fn bad_meshes_are_refused_with_the_reason() {
    let cases: [(Result<Mesh>, &[&str]); 11] = [
        (Mesh::new(Vec::<usize>::new()), &["no axes", "at least one axis"]),
        (Mesh::new([("dp", 2), ("dp", 2)]), &["two axes called `dp`"]),
        (Mesh::new([("dp", 0)]), &["axis `dp` of size 0"]),
        (Mesh::new([("", 2)]), &["axis name", "``"]),
        (Mesh::new([("a=b", 2)]), &["axis name", "`a=b`"]),
        (Mesh::new([usize::MAX, 2]), &["at most", "ranks"]),
        (Mesh::from_ranks([2, 2], vec![0, 1, 2]), &["3 ranks", "needed 4 ranks"]),
        (Mesh::from_ranks([2, 2], vec![0, 1, 2, 1]), &["rank 1 at two coordinates"]),
        (Mesh::from_groups("a", "b", &[vec![0, 1], vec![2]]), &["sizes [2, 1]", "one size"]),
        (Mesh::new([2]).unwrap().on_device("cuda:0"), &["`cuda:0`", "without an index"]),
        (Mesh::new([4]).unwrap().unflatten("axis0", [("a", 3)]), &["3 coordinates", "multiply to 4"]),
    ];
    for (result, parts) in cases {
        let text = error(result);
        assert!(parts.iter().all(|p| text.contains(p)), "{parts:?} missing in: {text}");
    }
}

#[test]
fn bad_mesh_text_is_refused_with_the_part_that_is_wrong() {
    for (text, part) in [
        ("", "``"),
        ("dp", "`dp`"),
        ("dp=", "``"),
        ("dp=two", "`two`"),
        ("dp=2,tp", "`tp`"),
        ("dp=2,,tp=2", "``"),
        ("dp=-1", "`-1`"),
        ("dp=2@0,x", "`x`"),
        ("dp=2@0", "1 ranks"),
        ("cu da/dp=2", "`cu da`"),
        ("2=2", "`2`"),
    ] {
        let message = error(text.parse());
        assert!(message.contains(part), "{part} missing for `{text}`: {message}");
    }
}

#[test]
fn text_and_serde_round_trip() {
    for text in ["dp=2,tp=4", "axis0=3", "cuda/dp=2", "tp=2,pp=2@2,6,3,7", "xla/a=1@7"] {
        let mesh: Mesh = text.parse().unwrap();
        assert_eq!(mesh.to_string(), text);
        let json = serde_json::to_string(&mesh).unwrap();
        assert_eq!(serde_json::from_str::<Mesh>(&json).unwrap(), mesh);
    }
    assert_eq!("2x3".parse::<Mesh>().unwrap(), Mesh::new([2, 3]).unwrap());
    assert_eq!(" dp = 2 , tp = 3 ".parse::<Mesh>().unwrap(), Mesh::new([("dp", 2), ("tp", 3)]).unwrap());
    assert!(serde_json::from_str::<Mesh>("\"dp=0\"").is_err());
}

#[test]
fn equal_meshes_are_interned_and_differ_by_device_type_names_and_ranks() {
    let mesh = Mesh::new([("a", 2), ("b", 2)]).unwrap();
    assert_eq!(mesh, Mesh::from_ranks([("a", 2), ("b", 2)], vec![0, 1, 2, 3]).unwrap());
    assert_eq!(mesh.stable_hash(), "a=2,b=2".parse::<Mesh>().unwrap().stable_hash());
    for other in ["a=2,c=2", "a=4", "a=2,b=2@1,0,2,3", "cuda/a=2,b=2"] {
        let other: Mesh = other.parse().unwrap();
        assert_ne!(mesh, other);
        assert_ne!(mesh.stable_hash(), other.stable_hash());
    }
}

#[test]
fn coordinates_and_ranks_are_inverse_for_any_rank_map() {
    for mesh in ["a=2,b=3,c=2", "a=2,b=2@7,1,5,3", "a=3@1,2,0"] {
        let mesh: Mesh = mesh.parse().unwrap();
        for &rank in mesh.ranks() {
            let coordinate = mesh.coordinate(rank).unwrap();
            assert_eq!(mesh.rank_at(&coordinate), Some(rank));
            for (axis, c) in mesh.axes().iter().zip(&coordinate) {
                assert_eq!(mesh.local_rank(rank, &axis.name).unwrap(), Some(*c));
            }
        }
        assert_eq!(mesh.coordinate(99), None);
        assert!(!mesh.contains(99));
        assert_eq!(mesh.local_rank(99, "a").unwrap(), None);
        assert_eq!(mesh.rank_at(&[9; 3][..mesh.ndim()]), None);
        assert_eq!(mesh.rank_at(&[0; 9]), None);
    }
}

#[test]
fn every_slice_holds_its_rank_and_groups_partition_the_mesh() {
    let mesh: Mesh = "a=2,b=3,c=2@11,10,9,8,7,6,5,4,3,2,1,0".parse().unwrap();
    for names in [vec!["a"], vec!["b", "a"], vec!["c", "a", "b"], vec!["a", "c"]] {
        for &rank in mesh.ranks() {
            let sub = mesh.slice(&names, rank).unwrap();
            let coordinate = sub.coordinate(rank).expect("the slice passes through the rank");
            for (name, c) in names.iter().zip(coordinate) {
                assert_eq!(mesh.local_rank(rank, name).unwrap(), Some(c));
            }
        }
    }
    for axis in ["a", "b", "c"] {
        let mut all = mesh.groups(axis).unwrap().concat();
        all.sort_unstable();
        assert_eq!(all, (0..12).collect::<Vec<_>>());
    }
    let outside = mesh.slice(["b"], 50).unwrap();
    assert_eq!(outside.ranks(), [11, 9, 7]);
    assert!(error(mesh.slice(["x"], 0)).contains("one of `a`, `b`, `c`"));
    assert!(error(mesh.slice(["a", "a"], 0)).contains("axis `a` twice"));
    assert!(error(mesh.slice(Vec::<&str>::new(), 0)).contains("no axis"));
}

#[test]
fn flatten_and_unflatten_are_inverse_and_keep_the_order_given() {
    let mesh = Mesh::new([("a", 2), ("b", 3), ("c", 2)]).unwrap();
    let flat = mesh.flatten(["a", "b"], "ab").unwrap();
    assert_eq!(flat.unflatten("ab", [("a", 2), ("b", 3)]).unwrap(), mesh);
    // c varies slower than a once it is named first
    let swapped = mesh.flatten(["c", "a"], "ca").unwrap();
    assert_eq!(swapped.to_string(), "b=3,ca=4@0,6,1,7,2,8,3,9,4,10,5,11");
    let all = mesh.flatten(["a", "b", "c"], "all").unwrap();
    assert_eq!(all.ranks(), mesh.ranks());
    assert!(error(mesh.flatten(["a", "b"], "c")).contains("two axes called `c`"));
}

#[test]
fn concatenate_needs_slices_of_the_root_through_one_rank() {
    let root = Mesh::new([("pp", 2), ("dp", 2), ("tp", 2)]).unwrap();
    let (dp, tp) = (root.slice(["dp"], 6).unwrap(), root.slice(["tp"], 6).unwrap());
    assert_eq!(root.concatenate(&[&tp, &dp]).unwrap(), root.slice(["tp", "dp"], 6).unwrap());
    let far = root.slice(["tp"], 0).unwrap();
    assert!(error(root.concatenate(&[&dp, &far])).contains("share no rank"));
    assert!(error(root.concatenate(&[])).contains("share no rank"));
    assert!(error(root.concatenate(&[&dp, &dp])).contains("axis `dp` twice"));
    let foreign = Mesh::from_ranks([("dp", 2)], vec![6, 7]).unwrap();
    assert!(error(root.concatenate(&[&foreign])).contains("the slice of"));
}

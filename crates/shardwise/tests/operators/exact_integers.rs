//! Sorting, scans, indexing and reductions of i64 that f64 cannot represent: every result is exact, in every placement.

use candle_core::{Device, Tensor};
use shardwise::prelude::*;

const BIG: i64 = 1 << 53;
const ROWS: usize = 4;
const COLUMNS: usize = 3;

/// Neighbours around 2^53 and at the ends of i64: as f64, many of them would be equal.
const X: [[i64; COLUMNS]; ROWS] =
    [[BIG + 1, BIG, i64::MAX], [-BIG - 1, i64::MAX - 1, i64::MIN], [1, BIG + 3, BIG + 2], [BIG + 2, 0, -1]];

fn expect(name: &str, got: &DTensor, expected: impl IntoIterator<Item = i64>) -> Result<()> {
    let found: Vec<i64> = got.full_tensor()?.flatten_all()?.to_vec1()?;
    assert_eq!(found, expected.into_iter().collect::<Vec<_>>(), "{name}, result {}", got.layout());
    Ok(())
}

/// The columns of a matrix, after a function of each.
fn by_columns(of: impl Fn([i64; ROWS]) -> Vec<i64>) -> Vec<i64> {
    let columns: Vec<Vec<i64>> = (0..COLUMNS).map(|c| of(X.map(|row| row[c]))).collect();
    (0..columns[0].len()).flat_map(|r| columns.iter().map(move |column| column[r]).collect::<Vec<_>>()).collect()
}

/// The indices of the elements in order: descending or not, stable.
fn order(line: &[i64], descending: bool) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..line.len()).collect();
    indices.sort_by(|&i, &j| if descending { line[j].cmp(&line[i]) } else { line[i].cmp(&line[j]) });
    indices
}

fn scanned(line: &[i64], step: impl Fn(i64, i64) -> i64) -> Vec<i64> {
    line[1..].iter().fold(vec![line[0]], |mut all, &x| {
        all.push(step(all[all.len() - 1], x));
        all
    })
}

fn in_every_placement(check: fn(&DTensor, &DeviceMesh) -> Result<()>) {
    for placement in [Placement::Replicate, Placement::Shard(0), Placement::Shard(1)] {
        ThreadWorld::new(2)
            .unwrap()
            .run(move |world| {
                let mesh = world.mesh([("a", world.size())])?;
                let x =
                    DTensor::distribute_tensor(&Tensor::new(&X, &Device::Cpu)?, &mesh, [placement.clone()], Some(0))?;
                check(&x, &mesh)
            })
            .unwrap();
    }
}

fn on(mesh: &DeviceMesh, tensor: &Tensor) -> Result<DTensor> {
    DTensor::distribute_tensor(tensor, mesh, [Placement::Replicate], Some(0))
}

#[test]
fn sorting_and_selection() {
    in_every_placement(|x, _| {
        for descending in [false, true] {
            let (values, indices) = x.sort(0, descending)?;
            let sorted = |c: [i64; ROWS]| order(&c, descending).into_iter().map(|i| c[i]).collect();
            expect("sort", &values, by_columns(sorted))?;
            let sorted = |c: [i64; ROWS]| order(&c, descending).into_iter().map(|i| i as i64).collect();
            expect("sort", &indices, by_columns(sorted))?;
            let sorted = X.iter().flat_map(|row| order(row, descending).into_iter().map(|i| i as i64));
            expect("argsort", &x.argsort(1, descending)?, sorted)?;
            let (values, indices) = x.topk(2, 1, descending)?;
            expect("topk", &values, X.iter().flat_map(|r| order(r, descending).into_iter().take(2).map(|i| r[i])))?;
            let first = X.iter().flat_map(|r| order(r, descending).into_iter().take(2).map(|i| i as i64));
            expect("topk", &indices, first)?;
        }
        expect("kthvalue", &x.kthvalue(3, 0, false)?.0, by_columns(|c| vec![c[order(&c, false)[2]]]))?;
        expect("max_dim", &x.max_dim(0, false)?.0, by_columns(|c| vec![c[order(&c, true)[0]]]))?;
        expect("max_dim", &x.max_dim(0, false)?.1, by_columns(|c| vec![order(&c, true)[0] as i64]))?;
        expect("min_dim", &x.min_dim(1, false)?.0, X.iter().map(|r| r[order(r, false)[0]]))?;
        expect("argmax", &x.argmax(Some(1), false)?, X.iter().map(|r| order(r, true)[0] as i64))?;
        expect("argmin", &x.argmin(None, false)?, [5])?;
        let (least, most) = x.aminmax(Some(0), false)?;
        expect("aminmax", &least, by_columns(|c| vec![c.into_iter().min().unwrap()]))?;
        expect("aminmax", &most, by_columns(|c| vec![c.into_iter().max().unwrap()]))?;
        expect("sum", &x.sum(&[0], false)?, by_columns(|c| vec![c.into_iter().fold(0, i64::wrapping_add)]))
    });
}

#[test]
fn scans() {
    in_every_placement(|x, _| {
        expect("cumsum", &x.cumsum(0)?, by_columns(|c| scanned(&c, i64::wrapping_add)))?;
        expect("cumsum", &x.cumsum(1)?, X.iter().flat_map(|r| scanned(r, i64::wrapping_add)))?;
        expect("cumprod", &x.cumprod(0)?, by_columns(|c| scanned(&c, i64::wrapping_mul)))?;
        expect("cummax", &x.cummax(0)?.0, by_columns(|c| scanned(&c, i64::max)))?;
        expect("cummin", &x.cummin(1)?.0, X.iter().flat_map(|r| scanned(r, i64::min)))?;
        let last =
            |c: [i64; ROWS]| (0..ROWS).map(|i| (0..=i).max_by_key(|&j| (c[j], j)).unwrap() as i64).collect::<Vec<_>>();
        expect("cummax", &x.cummax(0)?.1, by_columns(last))
    });
}

#[test]
fn indexing_by_every_integer_type() {
    in_every_placement(|x, mesh| {
        let positions = [3usize, 0, 0, 2, 1];
        for dtype in [DType::I64, DType::I32, DType::I16, DType::U32, DType::U8] {
            let vector = Tensor::new(&positions.map(|p| p as i64), &Device::Cpu)?;
            let index = on(mesh, &vector.to_dtype(dtype)?)?;
            let rows = || positions.iter().flat_map(|&p| X[p]);
            expect("index_select", &x.index_select(0, &index)?, rows())?;
            expect("index", &x.index(&index)?, rows())?;
            expect("embedding", &x.embedding(&index)?, rows())?;
            let columns = on(mesh, &vector.reshape((5, 1))?.broadcast_as((5, COLUMNS))?.to_dtype(dtype)?)?;
            expect("gather", &x.gather(0, &columns)?, rows())?;
            let mut summed = X;
            for (i, &p) in positions.iter().enumerate() {
                (0..COLUMNS).for_each(|c| summed[p][c] = summed[p][c].wrapping_add(X[positions[i]][c]));
            }
            let source = x.index_select(0, &index)?;
            let flat = || summed.into_iter().flatten();
            expect("index_add", &x.index_add(0, &index, &source)?, flat())?;
            expect("scatter_add", &x.scatter_add(0, &columns, &source)?, flat())?;
            expect("index_put", &x.index_put(&[&index], &source, true)?, flat())?;
            let first = on(mesh, &Tensor::new(&[[2i64; COLUMNS]], &Device::Cpu)?.to_dtype(dtype)?)?;
            let mut written = X;
            written[2] = X[0];
            expect("scatter", &x.scatter(0, &first, &x.narrow(0, 0, 1)?)?, written.into_iter().flatten())?;
        }
        Ok(())
    });
}

#[test]
fn masks_bands_and_buckets() {
    in_every_placement(|x, mesh| {
        let mask = X.map(|row| row.map(|n| u8::from(n > BIG)));
        let chosen = || X.iter().flatten().copied().filter(|&n| n > BIG);
        let mask = on(mesh, &Tensor::new(&mask, &Device::Cpu)?)?;
        expect("masked_select", &x.masked_select(&mask)?, chosen())?;
        let places = (0..ROWS * COLUMNS).filter(|i| X[i / COLUMNS][i % COLUMNS] != 0);
        let places = places.flat_map(|i| [(i / COLUMNS) as i64, (i % COLUMNS) as i64]);
        expect("nonzero", &x.nonzero()?, places)?;
        let inside = |keep: fn(usize, usize) -> bool| {
            (0..ROWS * COLUMNS)
                .map(move |i| (i / COLUMNS, i % COLUMNS))
                .map(move |(r, c)| if keep(r, c) { X[r][c] } else { 0 })
        };
        expect("tril", &x.tril(0)?, inside(|r, c| c <= r))?;
        expect("triu", &x.triu(1)?, inside(|r, c| c > r))?;
        expect("flip", &x.flip(&[0, 1])?, X.into_iter().flatten().rev())?;
        let edges = [i64::MIN, -BIG, BIG, BIG + 1, BIG + 2, i64::MAX];
        let buckets = on(mesh, &Tensor::new(&edges, &Device::Cpu)?)?;
        let found = X.iter().flatten().map(|x| edges.partition_point(|e| e < x) as i64);
        expect("bucketize", &x.bucketize(&buckets)?, found)
    });
}

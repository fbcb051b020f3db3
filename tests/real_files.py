"""Small files of PDEBench's families, made with its own numerics; beside the repository and not part of it."""

from pathlib import Path

SMALL_FILES = Path(__file__).resolve().parents[2] / "shared" / "data" / "pdebench-small"
REAL_FILES = {
    "advection1d": "1D_Advection_Sols_beta0.4.hdf5",
    "burgers1d": "1D_Burgers_Sols_Nu0.01.hdf5",
    "reacdiff1d": "ReacDiff_Nu0.5_Rho1.0.hdf5",
    "diffsorp1d": "1D_diff-sorp_NA_NA.h5",
    "cfd1d": "1D_CFD_Rand_Eta0.01_Zeta0.01_periodic_Train.hdf5",
    "darcy2d": "2D_DarcyFlow_beta1.0_Train.hdf5",
    "shallowwater2d": "2D_rdb_NA_NA.h5",
    "diffreact2d": "2D_diff-react_NA_NA.h5",
    "cfd2d": "2D_CFD_Rand_M0.1_Eta0.01_Zeta0.01_periodic_48_Train.hdf5",
    "incompressible2d": "ns_incom_inhom_2d_48-3.h5",
    "cfd3d": "3D_CFD_Rand_M1.0_Eta1e-08_Zeta1e-08_periodic_Train.hdf5",
}

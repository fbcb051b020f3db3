"""Files as published on DaRUS (doi:10.18419/darus-2986) that are read as one of our families.

Names, ids and MD5 are those of pdebench/data_download/pdebench_data_urls.csv in the PDEBench repository; ids elsewhere
may be stale. Left out are files of other boundaries or layouts, and all but two of the 275 of incompressible flow.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RemoteFile:
    """One file as published."""

    name: str
    id: int  # of the data file in DaRUS
    md5: str
    size_gib: float  # rounded up


TABLE = """
advection1d 7.7 1D_Advection_Sols_beta0.1.hdf5 255672 b4be2fc3383f737c76033073e6d2ccfb
advection1d 7.7 1D_Advection_Sols_beta0.2.hdf5 255671 d47b52c1be4b6bcaa8748a8df2f5fbb8
advection1d 7.7 1D_Advection_Sols_beta0.4.hdf5 255674 d595bbfd2c659df995a93cd40d6ea568
advection1d 7.7 1D_Advection_Sols_beta0.7.hdf5 255666 f89030c240a1e90b55649776854a84c2
advection1d 7.7 1D_Advection_Sols_beta1.0.hdf5 255675 1fe41923a4123db55bf4e89bea32e142
advection1d 7.7 1D_Advection_Sols_beta2.0.hdf5 255677 0e9beff98693089c38e213a1f2b9ac43
advection1d 7.7 1D_Advection_Sols_beta4.0.hdf5 255676 a87b03ff425496360e2732921805f47d
advection1d 7.7 1D_Advection_Sols_beta7.0.hdf5 255664 72a286ad2fcba574bd20bc045ba82d58
burgers1d 7.7 1D_Burgers_Sols_Nu0.001.hdf5 268190 44cb784d5a07aa2b1c864cabdcf625f9
burgers1d 7.7 1D_Burgers_Sols_Nu0.002.hdf5 268193 edf1cd13622d151dfde3e4e5af7a95b4
burgers1d 7.7 1D_Burgers_Sols_Nu0.004.hdf5 268191 435e1fecb8a64a0b4563bb8d09f81c33
burgers1d 7.7 1D_Burgers_Sols_Nu0.01.hdf5 281363 e6d9a4f62baf9a29121a816b919e2770
burgers1d 7.7 1D_Burgers_Sols_Nu0.02.hdf5 268189 7c8c717a3a7818145877baa57106b090
burgers1d 7.7 1D_Burgers_Sols_Nu0.04.hdf5 281362 16f4c7afaf8c16238be157e54c9297c7
burgers1d 7.7 1D_Burgers_Sols_Nu0.1.hdf5 268185 660ba1008d3843bf4e28d2895eb607ce
burgers1d 7.7 1D_Burgers_Sols_Nu0.2.hdf5 268187 01d9333254dff2f3cad090b61f5cf695
burgers1d 7.7 1D_Burgers_Sols_Nu0.4.hdf5 268192 58327a6107e8f9defb5075677cc42533
burgers1d 7.7 1D_Burgers_Sols_Nu1.0.hdf5 281365 9021eba35332d127306f11ef84c1a60f
burgers1d 7.7 1D_Burgers_Sols_Nu2.0.hdf5 281364 70fe0c24d9313e70f6059e5212bdb3d7
burgers1d 7.7 1D_Burgers_Sols_Nu4.0.hdf5 268188 8af7f70166c00ffad377c80fa477d81f
cfd1d 11.6 1D_CFD_Rand_Eta0.01_Zeta0.01_periodic_Train.hdf5 164672 2fdd00138f1d7abc794fb953021a9f43
cfd1d 11.6 1D_CFD_Rand_Eta0.1_Zeta0.1_periodic_Train.hdf5 164668 45655bd77d006ab539c52b7fbcf099b9
cfd1d 11.6 1D_CFD_Rand_Eta1.e-8_Zeta1.e-8_periodic_Train.hdf5 135485 ad22fe08b8abc721179dbb34f2cc8b2a
diffsorp1d 4 1D_diff-sorp_NA_NA.h5 133020 9d466d1213065619d087319e16d9a938
reacdiff1d 3.9 ReacDiff_Nu0.5_Rho1.0.hdf5 133177 69a429239778d529cd419ed5888ea835
reacdiff1d 3.9 ReacDiff_Nu0.5_Rho10.0.hdf5 133178 ff7c724b18e7ebe02e19c179852f48ee
reacdiff1d 3.9 ReacDiff_Nu0.5_Rho2.0.hdf5 133179 ac907daa7e483d203a5c77567cdea561
reacdiff1d 3.9 ReacDiff_Nu0.5_Rho5.0.hdf5 133180 fb149e7540d8977af158bb8fec1048a3
reacdiff1d 3.9 ReacDiff_Nu1.0_Rho1.0.hdf5 133181 bd73c2f3448d03e95e98c3831fc8fa70
reacdiff1d 3.9 ReacDiff_Nu1.0_Rho10.0.hdf5 133182 a94e65631881a27ddae3ef74caf53093
reacdiff1d 3.9 ReacDiff_Nu1.0_Rho2.0.hdf5 133183 112c01a76447162bd67c8c1073f58ca2
reacdiff1d 3.9 ReacDiff_Nu1.0_Rho5.0.hdf5 133184 fa224c9d143de37ac6914d391e70f425
reacdiff1d 3.9 ReacDiff_Nu2.0_Rho1.0.hdf5 133185 925a7e2c9b9e40ad2dd44b7002ec882b
reacdiff1d 3.9 ReacDiff_Nu2.0_Rho10.0.hdf5 133186 a3e25a9fb8a99f010352ad3dd1afd596
reacdiff1d 3.9 ReacDiff_Nu2.0_Rho2.0.hdf5 133187 426353b241acfbc64067acb1bdc80ade
reacdiff1d 3.9 ReacDiff_Nu2.0_Rho5.0.hdf5 133188 f2890bdac5103a3b78fac5f80e57b760
reacdiff1d 3.9 ReacDiff_Nu5.0_Rho1.0.hdf5 133189 0ed75b55f61bec11c47d379e34959e54
reacdiff1d 3.9 ReacDiff_Nu5.0_Rho10.0.hdf5 133190 264c80af0e2a6cc1f70e87275e0f6ac4
reacdiff1d 3.9 ReacDiff_Nu5.0_Rho2.0.hdf5 133191 f927f5d85f2e9bd97dff31b4dab051ae
reacdiff1d 3.9 ReacDiff_Nu5.0_Rho5.0.hdf5 133192 c9c26e2b5f2d4bf5bcbbd4ba34fefd5e
cfd2d 52 2D_CFD_Rand_M0.1_Eta0.01_Zeta0.01_periodic_128_Train.hdf5 164687 5b21dcccaef4d2145ca579a71153c580
cfd2d 52 2D_CFD_Rand_M0.1_Eta0.1_Zeta0.1_periodic_128_Train.hdf5 164688 b2733888745a1d64e36df813e979910b
cfd2d 83 2D_CFD_Rand_M0.1_Eta1e-08_Zeta1e-08_periodic_512_Train.hdf5 164689 ae2552864d0856f58dc74132a2f95d20
cfd2d 52 2D_CFD_Rand_M1.0_Eta0.01_Zeta0.01_periodic_128_Train.hdf5 164690 21969082d0e9524bcc4708e216148e60
cfd2d 52 2D_CFD_Rand_M1.0_Eta0.1_Zeta0.1_periodic_128_Train.hdf5 164691 75a34f34a3dcd9bc8ae4b7adf8bf372c
cfd2d 83 2D_CFD_Rand_M1.0_Eta1e-08_Zeta1e-08_periodic_512_Train.hdf5 164692 04fcc44c39acea69e2869b84cd653d4a
cfd2d 83 2D_CFD_Turb_M0.1_Eta1e-08_Zeta1e-08_periodic_512_Train.hdf5 164685 844555000d342d2947162c6cf46798e7
cfd2d 83 2D_CFD_Turb_M1.0_Eta1e-08_Zeta1e-08_periodic_512_Train.hdf5 164686 3f2c7376cde5fb072db0f9814f1c6992
darcy2d 1.3 2D_DarcyFlow_beta0.01_Train.hdf5 133217 d05c287d4c0b7d3178b0097084238251
darcy2d 1.3 2D_DarcyFlow_beta0.1_Train.hdf5 133218 294f9a03a4aa16b0e386469ca8b471be
darcy2d 1.3 2D_DarcyFlow_beta1.0_Train.hdf5 133219 81694ed31306ff2e5f6b76349b0b4389
darcy2d 1.3 2D_DarcyFlow_beta10.0_Train.hdf5 133220 a7f23cf8011fc211b180828af39b7d1a
darcy2d 1.3 2D_DarcyFlow_beta100.0_Train.hdf5 133221 7c09f3b1bb097737d3fd52ffb0c6f1c8
diffreact2d 13 2D_diff-react_NA_NA.h5 133017 b8d0b86064193195ddc30c33be5dc949
shallowwater2d 6.2 2D_rdb_NA_NA.h5 133021 75d838c47aa410694bdc912ea7f22282
incompressible2d 9 ns_incom_inhom_2d_512-0.h5 133280 54109d46f9c957317bd670ddb2068ac0
incompressible2d 9 ns_incom_inhom_2d_512-1.h5 136439 e280fd3208fccb8ad5c1ff46c4796864
cfd3d 83 3D_CFD_Rand_M1.0_Eta1e-08_Zeta1e-08_periodic_Train.hdf5 164693 45892a12d1066d54af74badae55c438e
cfd3d 83 3D_CFD_Turb_M1.0_Eta1e-08_Zeta1e-08_periodic_Train.hdf5 164694 4f0eacaec5ff000bbd9a31026ea207b8
"""

PUBLISHED: dict[str, list[RemoteFile]] = {}  # by family
for _line in TABLE.split("\n")[1:-1]:
    _family, _size, _name, _id, _md5 = _line.split()
    PUBLISHED.setdefault(_family, []).append(RemoteFile(_name, int(_id), _md5, float(_size)))
